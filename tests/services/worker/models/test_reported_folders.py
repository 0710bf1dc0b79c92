"""Model folders from public reports: those transformers loads are the same model here, others are rejected with a
reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.shared.errors import InvalidArgument
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_output_heads import check, rows_of

FILE = "model.safetensors"
Make = Callable[[str], Checkpoint]
Spoil = Callable[[Path], None]


def config(**changes: Any) -> Spoil:
    """Changes fields of config.json; None writes null, ... removes the field."""

    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return spoil


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], name: str = FILE) -> Spoil:
    def spoil(folder: Path) -> None:
        found = change(load_file(folder / FILE))
        (folder / FILE).unlink()
        if name.endswith(".bin"):
            torch.save(found, folder / name)
        else:
            save_file(found, folder / name, {"format": "pt"})

    return spoil


def two_files_without_an_index(folder: Path) -> None:
    found = load_file(folder / FILE)
    names = sorted(found)
    (folder / FILE).unlink()
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: found[name] for name in part}, folder / f"model-0000{number}-of-00002.safetensors")


def consolidated_beside_it(folder: Path) -> None:
    """Adds Mistral's second copy of the weights under other names."""
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors")


def both(*spoils: Spoil) -> Spoil:
    def spoil(folder: Path) -> None:
        for one in spoils:
            one(folder)

    return spoil


SAME: dict[str, Spoil] = {
    "no dtype": config(dtype=..., torch_dtype="float32"),
    "quantization_config null": config(quantization_config=None),
    "quantization_config empty": config(quantization_config={}),
    "no generation_config.json": lambda folder: (folder / "generation_config.json").unlink(missing_ok=True),
    "unknown fields": config(use_cache=True, pretraining_tp=1, auto_map={"AutoModel": "x.Y"}, _name_or_path="/a"),
    "inverse frequencies": tensors(
        lambda found: {**found, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    ),
    "no prefix": tensors(lambda found: {name.removeprefix("model."): value for name, value in found.items()}),
    "a pickle": tensors(lambda found: found, "pytorch_model.bin"),
    "no index": two_files_without_an_index,
    "consolidated": consolidated_beside_it,
}


@pytest.mark.parametrize("name", SAME)
def test_reported_folders_load_as_the_same_model(name: str, checkpoint: Make, tmp_path: Path) -> None:
    """Folders reproduce reports of vllm, sglang, mlx and others."""
    made = checkpoint("llama")
    folder = Path(shutil.copytree(made.folder, tmp_path / "model"))
    SAME[name](folder)
    rows, tokens = rows_of(folder)
    wanted, those = rows_of(made.folder)
    assert tokens == those
    torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=0)


def renamed(change: Callable[[str], str]) -> Spoil:
    return tensors(lambda found: {change(name): value for name, value in found.items()})


TIED_ELSEWHERE = renamed(lambda name: name.replace("model.embed_tokens.weight", "lm_head.weight"))
OTHERS_NAMES: dict[str, tuple[str, Spoil]] = {
    "transformers#38870": ("qwen3-tied", TIED_ELSEWHERE),  # as safetensors.torch.save_model keeps tied weights
    "nanoGPT#325": ("llama", renamed("_orig_mod.{}".format)),
    "train-llm-from-scratch#36": ("llama", renamed("module._orig_mod.{}".format)),
    "vllm#2386": ("llama", renamed("base_model.model.{}".format)),  # state_dict() of a model that PEFT has merged
    "TGI PR 1058": ("opt", renamed(lambda name: name.replace("model.decoder.", "decoder."))),
    "vllm#18983": ("llama", renamed(lambda name: name.replace("model.", "model.language_model.", 1))),
    "vllm#3323": (  # a second copy of a tied head
        "gemma-tied",
        tensors(lambda found: {**found, "lm_head.weight": found["model.embed_tokens.weight"].clone()}),
    ),
}


@pytest.mark.parametrize("source", OTHERS_NAMES)
def test_weight_names_of_other_tools(source: str, checkpoint: Make, tmp_path: Path) -> None:
    family, spoil = OTHERS_NAMES[source]
    made = checkpoint(family)
    folder = Path(shutil.copytree(made.folder, tmp_path / "model"))
    spoil(folder)
    rows, tokens = rows_of(folder)
    wanted, those = rows_of(made.folder)
    assert tokens == those
    torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=0)


def without(name: str) -> Spoil:
    return tensors(lambda found: {key: value for key, value in found.items() if key != name})


REJECTED: dict[str, tuple[Spoil, str]] = {
    # Qwen3-VL-Embedding#89
    "ml02": (both(config(tie_word_embeddings=False), without("lm_head.weight")), r"lm_head\.weight"),
    "an extra layer": (
        tensors(lambda found: {**found, "model.layers.3.input_layernorm.weight": torch.ones(48)}),
        r"model\.layers\.3\.input_layernorm\.weight",
    ),
    "Chinese-LLaMA-Alpaca#87": (config(vocab_size=180), r"lm_head\.weight has shape \[211, 48\].*implies \[180, 48\]"),
    "unsloth#960": (  # an adapter that was not merged
        tensors(
            lambda found: {name.replace("q_proj.weight", "q_proj.base_layer.weight"): t for name, t in found.items()}
        ),
        r"lacks tensors .*q_proj\.weight",
    ),
    "a comma behind the last field": (
        lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text().rstrip()[:-1] + ",}"),
        r"config\.json is not JSON",
    ),
    "rope_theta as text": (config(rope_parameters=..., rope_theta="10000"), "rope_theta is '10000': a number"),
    "eps as text": (config(rms_norm_eps="1e-05"), "rms_norm_eps"),
    "architectures null": (config(architectures=None), "LlamaForCausalLM"),
    "tekken only": (lambda folder: (folder / "config.json").rename(folder / "params.json"), r"config\.json"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_unloadable_tensors_are_named(name: str, checkpoint: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama").folder, tmp_path / "model"))
    spoil, text = REJECTED[name]
    spoil(folder)
    with pytest.raises(InvalidArgument, match=text) as refused:
        rows_of(folder)
    assert "\n" not in str(refused.value)


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, Any] = {
    "null": None,
    "empty": {},
    "default": {"rope_type": "default"},
    "linear, older": {"type": "linear", "factor": 2.0},
    "linear, both names": {"type": "linear", "rope_type": "linear", "factor": 2},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "yarn": {"type": "yarn", **YARN},
    "yarn without the older length": {"rope_type": "yarn", "factor": 4.0},
    "yarn with its own scale": {"rope_type": "yarn", **YARN, "attention_factor": 1.3},
    "yarn with betas": {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_spellings_of_rope_scaling_are_those_of_transformers(name: str, checkpoint: Make, tmp_path: Path) -> None:
    """Reported in sglang PR 14745, vllm PR 28542 and aiter PR 4742."""
    folder = Path(shutil.copytree(checkpoint("llama").folder, tmp_path / "model"))
    config(rope_parameters=..., rope_theta=5000.0, rope_scaling=ROPES[name])(folder)
    check(folder, "LlamaForCausalLM")


@pytest.mark.parametrize("is_new", [False, True])
def test_both_spellings_of_gemma_3s_two_ropes(is_new: bool, checkpoint: Make, tmp_path: Path) -> None:
    """Older files have a second base for sliding-window layers, newer ones a section for each kind of layer."""
    folder = Path(shutil.copytree(checkpoint("gemma3-tied").folder, tmp_path / "model"))
    older = {"rope_theta": 2e5, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    newer = {
        "full_attention": {"rope_type": "linear", "rope_theta": 2e5, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
    }
    config(**({"rope_parameters": newer} if is_new else {"rope_parameters": ..., **older}))(folder)
    assert transformers.AutoConfig.from_pretrained(folder).rope_parameters == newer
    check(folder, "Gemma3ForCausalLM")
