"""`quire merge-adapter` writes checkpoints whose logits, in transformers, are those of the base with the adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.bundled import ADAPTERS, FOLDER
from quire.cli.main import main
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.lora import peft_folders
from tests.services.worker.lora.peft_folders import bases, each_expert, embedding, head, whole_embedding, whole_head

TOKENS = list(range(3, 40))
INDEX = "model.safetensors.index.json"
TINY = "model.safetensors"


def read(folder: Path) -> Any:
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, kind).from_pretrained(folder, dtype="auto", attn_implementation="eager").eval()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].float()


def merged(base: Path, adapter: Path, out: Path) -> Any:
    assert main(["merge-adapter", str(base), str(adapter), str(out)]) == 0
    return read(out)


def check(base: Checkpoint, adapter: Checkpoint, out: Path) -> None:
    found, wanted, before = logits(merged(base.folder, adapter.folder, out)), logits(adapter.model), logits(base.model)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    assert (wanted - before).abs().max() > 0.05, "the adapter changes nothing that could be seen"


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "of all linear layers": ("llama", {"more": [head]}),
    "rsLoRA, with ranks by pattern": (
        "llama",
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 9.0}},
    ),
    "DoRA": ("qwen3-tied", {"use_dora": True}),
    "GPT-2, whose weights lie the other way round": ("gpt2", {}),
    "DoRA of GPT-2": ("gpt2", {"use_dora": True}),
    "vectors of a table that is the head": ("qwen3-tied", {"more": [embedding]}),
    "logits of a table that is the head": ("qwen3-tied", {"more": [head]}),
    "both of them, with copies of the base": ("qwen3-tied", {"more": [bases, embedding, head]}),
    "both, apart": ("llama", {"more": [bases, embedding, head]}),
    "a whole table": ("qwen3-tied", {"more": [whole_embedding], "modules_to_save": ["embed_tokens"]}),
    "a whole head": ("qwen3-tied", {"more": [whole_head], "modules_to_save": ["lm_head"]}),
    "both whole": ("llama", {"more": [whole_embedding, whole_head], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "experts one by one": ("mixtral", {"more": [each_expert]}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_adapter(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, config = VARIANTS[name]
    base = checkpoints.make(family, tmp_path / "base")
    check(base, peft_folders.save(base, tmp_path / "a", seed=4, **config), tmp_path / "out")
    told = (
        "the output head is no longer tied to the embeddings: it is stored as a weight of its own"
        in capsys.readouterr().out
    )
    more: Sequence[Callable[..., None]] = config.get("more", ())
    assert told == (family == "qwen3-tied" and bool(more))


def test_shards_stay_shards_and_are_rounded_once(tmp_path: Path) -> None:
    """Checked in bfloat16, with the head in another file than the embeddings."""
    base = checkpoints.make("qwen3-tied", tmp_path / "base")
    adapter = peft_folders.save(base, tmp_path / "a", seed=4, more=[embedding, head])
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(base.folder / TINY).items()}
    names = [*sorted(tensors), "lm_head.weight"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()  # as some checkpoints have it
    places = {name: f"{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, base.folder / file)
    (base.folder / TINY).unlink()
    (base.folder / INDEX).write_text(json.dumps({"weight_map": places}))
    assert main(["merge-adapter", str(base.folder), str(adapter.folder), str(tmp_path / "out")]) == 0
    index = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert set(index) == set(places)
    wanted, exact = adapter.model.state_dict(), {name: tensor.float() for name, tensor in tensors.items()}
    for file in sorted(set(index.values())):
        for name, tensor in load_file(tmp_path / "out" / file).items():
            assert index[name] == file
            assert tensor.dtype is torch.bfloat16
            bound = wanted[name].abs() * 2**-8 + (exact[name] - base.model.state_dict()[name]).abs()
            assert ((tensor.float() - wanted[name]).abs() <= bound + 1e-6).all(), name


def test_the_bundled_model_speaks_as_its_adapter_has_it(tmp_path: Path) -> None:
    model = merged(FOLDER, ADAPTERS / "pirate", tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    question = [{"role": "user", "content": "What is 23 + 45?"}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    said = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=False, max_new_tokens=20)
    assert tokenizer.decode(said[0, inputs.input_ids.size(1) :], skip_special_tokens=True) == "Ahoy! 68 Arr!"


def _quantize(base: Path, _: Path) -> None:
    assert main(["quantize", str(base), "--to", "int8", "--out", str(base.with_name("q"))]) == 0
    shutil.rmtree(base)
    base.with_name("q").rename(base)


def _store_in_8_bits(base: Path, _: Path) -> None:
    tensors = load_file(base / TINY)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, base / TINY)


def _lack(base: Path, _: Path) -> None:
    tensors = load_file(base / TINY)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, base / TINY)


def _be_of_other_weights(base: Path, _: Path) -> None:
    tensors = load_file(base / TINY)
    name = "model.embed_tokens.weight"
    save_file({**tensors, name: tensors[name] * 2}, base / TINY)


def _be_wider(_: Path, adapter: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file({**tensors, name: tensors[name].repeat(2, 1)}, adapter / "adapter_model.safetensors")


def _be_ia3(_: Path, adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_quantize, "is already quantized (compressed-tensors)"),
        (
            _store_in_8_bits,
            "q_proj.weight is of torch.float8_e4m3fn: adapters are merged into weights of 16 or 32 bits",
        ),
        (_lack, "model.layers.1.self_attn.q_proj is not a layer of this checkpoint"),
        (_be_of_other_weights, "model.embed_tokens: the adapter's copy of this weight differs from the model's"),
        (_be_wider, "model.layers.0.self_attn.q_proj is for a weight of shape"),
        (_be_ia3, "peft_type is 'IA3', only 'LORA'"),
    ],
)
def test_what_cannot_be_merged_is_said(
    spoil: Callable[[Path, Path], None], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No partial output remains."""
    base = checkpoints.make("llama", tmp_path / "base")
    adapter = peft_folders.save(base, tmp_path / "a", seed=4, more=[bases, embedding, head])
    spoil(base.folder, adapter.folder)
    assert main(["merge-adapter", str(base.folder), str(adapter.folder), str(tmp_path / "out")]) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


def test_experts_that_are_one_parameter_and_folders_in_use_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = checkpoints.make("mixtral", tmp_path / "base")
    adapter = peft_folders.save(base, tmp_path / "a", seed=4, more=[peft_folders.all_experts])
    assert main(["merge-adapter", str(base.folder), str(adapter.folder), str(tmp_path / "out")]) == 1
    assert "merging adapters of stacked expert parameters is not supported" in capsys.readouterr().err
    assert main(["merge-adapter", str(base.folder), str(adapter.folder), str(base.folder)]) == 1
    assert "exists and is not empty" in capsys.readouterr().err
