"""Text parts of multimodal models equal transformers without images; vision weights are ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.services.worker.models.registry import check_config
from quire.shared.models.model_identity import identity, read_config
from tests.services.worker.checkpoints import (
    GEMMA3,
    LLAMA4,
    MINISTRAL3,
    SHAPE,
    SMALL_EXPERTS,
    VOCAB_SIZE,
    Checkpoint,
)
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

MAX_ERROR = 5e-5
SEES = {"intermediate_size": 64, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
SEES_LAYERS = {**SEES, "hidden_size": 32, "num_hidden_layers": 1}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
SMALL_HEADS = {  # Qwen2 derives it from hidden_size
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
QWEN_SEES = {"depth": 1, "num_heads": 2, "intermediate_size": 64}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "Gemma3ForConditionalGeneration": lambda: transformers.Gemma3Config(
        text_config={**SHAPE, **GEMMA3}, vision_config=SEES_LAYERS, mm_tokens_per_image=4
    ),
    "Idefics3ForConditionalGeneration": lambda: transformers.Idefics3Config(
        text_config={"model_type": "llama", **SHAPE}, vision_config=SEES_LAYERS
    ),
    "InternVLForConditionalGeneration": lambda: transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **SHAPE, "head_dim": 8}, vision_config={**SEES_LAYERS, "patch_size": 7}
    ),
    "Llama4ForConditionalGeneration": lambda: transformers.Llama4Config(
        text_config={**SHAPE, **LLAMA4, "pad_token_id": 0},
        vision_config={**SEES_LAYERS, "vision_output_dim": 32, "projector_output_dim": 32},
    ),
    "LightOnOcrForConditionalGeneration": lambda: transformers.LightOnOcrConfig(
        text_config={"model_type": "qwen3", **SHAPE},
        vision_config={"model_type": "pixtral", "head_dim": 16, **SEES_LAYERS},
    ),
    "LlavaNextForConditionalGeneration": lambda: transformers.LlavaNextConfig(
        text_config={"model_type": "mistral", **SHAPE, "sliding_window": None},
        vision_config={"model_type": "clip_vision_model", **SEES_LAYERS, "projection_dim": 16},
    ),
    "LlavaOnevisionForConditionalGeneration": lambda: transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **SHAPE, "head_dim": 8},
        vision_config={"model_type": "siglip_vision_model", **SEES_LAYERS, "vision_use_head": False},
    ),
    "Mistral3ForConditionalGeneration": lambda: transformers.Mistral3Config(
        text_config={"model_type": "mistral", **SHAPE, "sliding_window": None},
        vision_config={"model_type": "pixtral", "head_dim": 16, **SEES_LAYERS},
    ),
    "Mistral3ForConditionalGeneration-ministral3": lambda: transformers.Mistral3Config(
        text_config={"model_type": "ministral3", **SHAPE, "pad_token_id": 0, "rope_parameters": MINISTRAL3},
        vision_config={"model_type": "pixtral", "head_dim": 16, **SEES_LAYERS},
    ),
    "Qwen2VLForConditionalGeneration": lambda: transformers.Qwen2VLConfig(
        text_config={**SHAPE, **SMALL_HEADS, **ENDS}, vision_config={**QWEN_SEES, "embed_dim": 32, "hidden_size": 48}
    ),
    "Qwen2_5_VLForConditionalGeneration": lambda: transformers.Qwen2_5_VLConfig(
        text_config={**SHAPE, **SMALL_HEADS, **ENDS},
        vision_config={**QWEN_SEES, "hidden_size": 32, "out_hidden_size": 48},
    ),
    "Qwen3VLForConditionalGeneration": lambda: transformers.Qwen3VLConfig(
        text_config={**SHAPE, **AXES, **ENDS},
        vision_config={**QWEN_SEES, "hidden_size": 32, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    ),
    "SmolVLMForConditionalGeneration": lambda: transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **SHAPE}, vision_config=SEES_LAYERS
    ),
    "Qwen3VLMoeForConditionalGeneration": lambda: transformers.Qwen3VLMoeConfig(
        text_config={**SHAPE, **AXES, **ENDS, **SMALL_EXPERTS},
        vision_config={**QWEN_SEES, "hidden_size": 32, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    ),
}


def saved(name: str, folder: Path) -> Checkpoint:
    config = MODELS[name]()
    config._attn_implementation = "eager"
    model = getattr(transformers, name.partition("-")[0])(config).eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter.size(-1) ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return Checkpoint(folder, model)


def text_of(made: Checkpoint) -> Checkpoint:
    """Returns the text model: Llama 4's multimodal class of transformers 5.24 cannot run without an image."""
    is_llama4 = made.model.config.model_type == "llama4"
    return Checkpoint(made.folder, made.model.language_model) if is_llama4 else made


@pytest.mark.parametrize("name", MODELS)
def test_the_text_part_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    made = saved(name, tmp_path)
    assert identity(tmp_path).vocab_size == VOCAB_SIZE
    rig = Rig(tmp_path)
    prompt = [(7 * i + 3) % VOCAB_SIZE for i in range(27)]
    rig.step([New(0, prompt)], {0: 10})
    rig.step(counts={0: 17})
    for _ in range(5):
        rig.step()
    rows, tokens = torch.stack(rig.logits[0]), rig.tokens(0)
    wanted = text_of(made).logits(tokens)[len(tokens) - len(rows) - 1 : -1]
    torch.testing.assert_close(rows, wanted, atol=MAX_ERROR, rtol=0)


def test_files_from_before_transformers_5_are_flat(tmp_path: Path) -> None:
    """The config file of Qwen2-VL has the text model's fields at the top level."""
    flat = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        **{"tie_word_embeddings": True, "vision_config": {"depth": 1, "hidden_size": 7}, "eos_token_id": 5},
    }
    (tmp_path / "config.json").write_text(json.dumps(flat))
    config = read_config(tmp_path)
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert "vision_config" not in config
    decoder = check_config(config)
    assert (decoder.hidden_size, decoder.tie_word_embeddings) == (64, True)


def test_defaults_of_published_configs(tmp_path: Path) -> None:
    """The config file of Gemma 3 omits most fields of its text model."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    config = read_config(tmp_path)
    decoder = check_config(config)
    assert (decoder.num_q_heads, decoder.num_kv_heads, decoder.head_dim, decoder.vocab_size) == (8, 4, 256, 262_208)
    assert decoder.tie_word_embeddings
    assert config["eos_token_id"] == [1, 106]


def test_published_files_of_qwen3_vl_moe_stack_experts_with_inputs_first(tmp_path: Path) -> None:
    made = saved("Qwen3VLMoeForConditionalGeneration", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert any(".experts." in name for name in tensors)
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    save_file(turned, path, {"format": "pt"})
    rig = Rig(tmp_path)
    prompt = [(7 * i + 3) % VOCAB_SIZE for i in range(9)]
    rig.step([New(0, prompt)], {0: 9})
    torch.testing.assert_close(rig.logits[0][0], made.logits(prompt)[-1], atol=MAX_ERROR, rtol=0)
