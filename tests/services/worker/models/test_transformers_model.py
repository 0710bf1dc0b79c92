"""Models without native code run with that of transformers; unsupported ones are rejected by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.services.worker.models.registry import ARCHITECTURES, read_model_config
from quire.shared.errors import InvalidArgument
from tests.services.worker.checkpoints import SHAPE, Checkpoint
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
VALUES = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", **SHAPE}


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3-moe-tied", "granite", "cohere"])
def test_supported_models_match_their_transformers_code(checkpoint: Make, family: str) -> None:
    """Includes models that scale logits behind the head."""
    made = checkpoint(family)
    rig = Rig(made.folder, model_impl="transformers")
    rig.step([New(0, prompt(30)), New(3, prompt(9, 2))], {0: 21, 3: 9})
    rig.step(counts={0: 9, 3: 1})
    for _ in range(4):
        rig.step()
    assert error(rig, made, 0) < MAX_ERROR
    assert error(rig, made, 3) < MAX_ERROR


def saved(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_attention_that_cannot_be_replaced_is_refused_before_a_token_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such layers compute attention in their own code, as some models do in some versions of transformers."""
    attention = transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention
    monkeypatch.setattr(attention, "forward", lambda self, hidden_states, *args, **kwargs: (hidden_states, None))
    with pytest.raises(InvalidArgument, match="0 of 3 layers use an attention that can be replaced"):
        Rig(saved(tmp_path, transformers.GPTNeoXConfig(**SHAPE)))


def test_a_model_that_does_not_fit_is_refused_at_the_start(tmp_path: Path) -> None:
    """As with GLM-4.7-Flash, config.json omits the head size that latent attention has."""
    sizes = {"vocab_size": 90, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "q_lora_rank": 16, "kv_lora_rank": 16}
    dims = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "mlp_layer_types": ["dense", "sparse"]}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Glm4MoeLiteConfig(**sizes, **heads, **dims, **experts, max_position_embeddings=256)
    with pytest.raises(InvalidArgument, match="its layers have queries of 6 heads of 16, where 6 of 8 were read"):
        Rig(saved(tmp_path, config))


def test_code_that_fails_at_a_first_step_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied\nmore")

    monkeypatch.setattr(transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXMLP, "forward", fail)
    with pytest.raises(InvalidArgument, match=r"fails .* first step: RuntimeError: mat1 and mat2 .* \(transformers\)$"):
        Rig(saved(tmp_path, transformers.GPTNeoXConfig(**{**SHAPE, "head_dim": 8, "num_key_value_heads": 6})))


def test_layers_that_keep_a_state_beside_attention_are_refused(tmp_path: Path) -> None:
    """All layers have attention, so that counting attention layers does not detect the states."""
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_d_ssm": 32, "mamba_n_heads": 4}
    config = transformers.FalconH1Config(
        **sizes, **heads, time_step_limit=None, mamba_d_head=8, mamba_d_state=8, head_dim=8
    )
    transformers.FalconH1ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgument, match="some of its layers are recurrent"):
        Rig(tmp_path, model_impl="transformers")


def test_a_cap_of_scores_is_refused(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**SHAPE, "layer_types": ["full_attention"] * 3, "attn_logit_softcapping": 50.0}
    folder = saved(tmp_path, transformers.Gemma2Config(**sizes))
    with pytest.raises(InvalidArgument, match="attention with softcap is not supported"):
        Rig(folder, model_impl="transformers")


@pytest.mark.parametrize("lost", [True, False])
def test_tensors_that_do_not_fit_are_named(checkpoint: Make, tmp_path: Path, lost: bool) -> None:
    folder = Path(shutil.copytree(checkpoint("gpt-neox").folder, tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
    if lost:
        del tensors[name]
    else:
        tensors["gpt_neox.unknown"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidArgument, match=f"missing keys: {re.escape(name)}" if lost else "unexpected keys"):
        Rig(folder)


def test_dummy_weights_of_transformers_models(checkpoint: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint("stablelm").folder / "config.json").read_text())
    rig = Rig(tmp_path, load_format="dummy")
    rig.step([New(0, prompt(7))], {0: 7})
    assert torch.isfinite(rig.logits[0][0]).all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "no_such_model"}, r"architectures is \['GPTNeoXForCausalLM'\]; supported"),
        ({"model_type": "../gpt_neox"}, "architectures is"),
        ({"architectures": ["GPTNeoXForSequenceClassification"]}, "architectures is"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map is .*: code from a checkpoint is never executed"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"alibi": True}, "alibi is True"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types is 'linear_attention'"),
        ({"num_attention_heads": None}, "num_attention_heads is None"),
    ],
)
def test_known_unsupported_models_are_rejected_by_config(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read_model_config({**VALUES, **changes})


def test_native_code_is_preferred_and_can_be_required() -> None:
    assert (
        read_model_config({**VALUES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}).rope.kind != "none"
    )
    with pytest.raises(InvalidArgument, match="supported: "):
        read_model_config(VALUES, "quire")
    with pytest.raises(InvalidArgument, match="model_type is 'x': transformers does not know it"):
        read_model_config({**VALUES, "model_type": "x"}, "transformers")
    assert "GPTNeoXForCausalLM" not in ARCHITECTURES
    assert json.dumps(read_model_config(VALUES).sliding_windows) == "[0, 0, 0]"
