"""Small random checkpoints of Qwen2-VL to Qwen3-VL-MoE, and prompts with pictures as frontends make them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.columns import i32_bytes
from quire.shared.media.processor import MediaProcessor
from quire.shared.media.registry import read_media_processor
from quire.shared.pb.common.v1 import media_pb2
from tests.services.worker.checkpoints import SHAPE, SMALL_EXPERTS, VOCAB_SIZE
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

NUM_TOKENS = 6
MAX_ERROR = 2e-4
PLACEHOLDER = VOCAB_SIZE - 1
PIXELS = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 2048}
PATCH = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
IN_PARTS = {**ENDS, "head_dim": 8, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}
ALTERNATING = {**ENDS, "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
OUT = {"hidden_size": 32, "out_hidden_size": SHAPE["hidden_size"], "intermediate_size": 52}
DEEP = {**OUT, "depth": 3, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]}
# Name -> class prefix in transformers, vision_config, text_config.
QWENS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2VL", {"embed_dim": 32, "hidden_size": SHAPE["hidden_size"], "depth": 2}, IN_PARTS),
    "qwen2.5": (
        "Qwen2_5_VL",
        {**OUT, "depth": 3, "window_size": 16, "fullatt_block_indexes": [1]},
        IN_PARTS,
    ),
    "qwen3": ("Qwen3VL", DEEP, ALTERNATING),
    "qwen3-levels-to-the-last-layer": ("Qwen3VL", {**DEEP, "deepstack_visual_indexes": [0, 1, 2]}, ALTERNATING),
    "qwen3-moe": ("Qwen3VLMoe", DEEP, {**ALTERNATING, **SMALL_EXPERTS}),
}  # fmt: skip


def make_qwen(folder: Path, name: str, *, vocab_size: int = VOCAB_SIZE, placeholder: int = PLACEHOLDER) -> Any:
    """Saves a checkpoint with random weights and its processor's file; returns the model of transformers."""
    prefix, vision, text = QWENS[name]
    config = getattr(transformers, f"{prefix}Config")(
        vision_config={**PATCH, **vision},
        text_config={**SHAPE, **text, "vocab_size": vocab_size},
        image_token_id=placeholder,
    )
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return model


def noise(height: int, width: int) -> Image.Image:
    rng = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


class NoText:
    """Tokenizer of expansions that have no text."""

    def encode(self, text: str) -> list[int]:
        raise AssertionError(text)


@dataclass(frozen=True)
class Prompt:
    """Prompt with its pictures, as frontends submit it."""

    tokens: list[int]
    items: tuple[media_pb2.MediaItem, ...]
    fetched: list[FetchedItem]
    pictures: list[Image.Image]


def read(folder: Path) -> MediaProcessor:
    processor = read_media_processor(folder)
    assert processor is not None
    return processor


def prompt_of(processor: MediaProcessor, *parts: int | Image.Image) -> Prompt:
    """Returns a prompt: a number stands for as many tokens of text."""
    prompt = Prompt([], (), [], [])
    for part in parts:
        if isinstance(part, int):
            start = len(prompt.tokens)
            prompt.tokens.extend((7 * (start + i) + 3) % (VOCAB_SIZE - 5) for i in range(part))
        else:
            prompt = _with_picture(processor, prompt, part)
    return prompt


def _with_picture(processor: MediaProcessor, prompt: Prompt, picture: Image.Image) -> Prompt:
    layout = processor.layout(picture.height, picture.width, {})
    pixels, expansion = processor.render(picture, layout).copy(), processor.expand(layout, NoText())
    identifier = hashlib.sha256(pixels.tobytes()).digest()
    item = media_pb2.MediaItem(
        identifier=identifier,
        offset=len(prompt.tokens),
        length=len(expansion.token_ids),
        num_embeddings=expansion.num_embeddings,
        modality="image",
        layout=i32_bytes(list(layout.numbers)),
    )
    fetched = FetchedItem(identifier, expansion.num_embeddings, layout.numbers, pixels)
    return Prompt(
        [*prompt.tokens, *expansion.token_ids],
        (*prompt.items, item),
        [*prompt.fetched, fetched],
        [*prompt.pictures, picture],
    )


def of_transformers(model: Any, pictures: Sequence[Image.Image], tokens: list[int]) -> dict[str, Any]:
    """Returns the inputs of transformers' model."""
    ids = torch.tensor([tokens])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pictures:
        inputs |= Qwen2VLImageProcessorPil(**PIXELS)(list(pictures), return_tensors="pt")
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return inputs


def greedy(model: Any, prompt: Prompt, count: int) -> list[int]:
    """Returns the tokens that transformers generates."""
    model.generation_config.eos_token_id = None  # the rig samples on after it
    with torch.inference_mode():
        inputs = of_transformers(model, prompt.pictures, prompt.tokens)
        found = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    tokens: list[int] = found[0, len(prompt.tokens) :].tolist()
    return tokens


def logits(model: Any, prompt: Prompt, tokens: list[int]) -> torch.Tensor:
    """Returns transformers' logits of all `tokens`, the prompt's and those that follow."""
    with torch.inference_mode():
        rows: torch.Tensor = model(**of_transformers(model, prompt.pictures, tokens), use_cache=False).logits[0]
    return rows


def with_published_names(source: Path, target: Path, *, is_flat: bool) -> None:
    """Copies a checkpoint with the tensor names and the form of config.json that were published.

    `is_flat`: the text model's fields are at the top level, and its tensors beside the tower's.
    """
    config = json.loads((source / "config.json").read_text())
    text = "model." if is_flat else "model.language_model."
    tower = "visual." if is_flat else "model.visual."
    if is_flat:
        inner = config.pop("text_config")
        config = {**inner, **config, "rope_scaling": {**inner.pop("rope_parameters"), "type": "mrope"}}
        del config["rope_parameters"], config["rope_scaling"]["rope_type"]
        config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
    (target / "config.json").write_text(json.dumps(config))
    (target / "preprocessor_config.json").write_text((source / "preprocessor_config.json").read_text())
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        if plain.startswith("visual."):
            plain = tower + plain.removeprefix("visual.")
        elif not plain.startswith("lm_head."):
            plain = text + plain
        tensors[plain] = tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def encode(rig: Rig, *prompts: Prompt) -> None:
    """Encodes the prompts' pictures, all in one call."""
    items = {item.identifier: item for prompt in prompts for item in prompt.fetched}
    with torch.inference_mode():
        batch = rig.replica.media.encode([*items.values()])
    batch.wait()
    assert batch.errors == (None,) * len(items), batch.errors


def answer(rig: Rig, slot: int, count: int = NUM_TOKENS) -> list[int]:
    """Decodes until the slot has `count` tokens of output."""
    row = rig.scheduler.rows[slot]
    while len(row.tokens) < row.num_prompt + count:
        rig.step()
    return row.tokens[row.num_prompt :][:count]


def compute(rig: Rig, slot: int, prompt: Prompt, chunk: int) -> None:
    """Admits a prompt and computes it in chunks."""
    rig.step([New(slot, prompt.tokens, media=prompt.items)], {slot: min(chunk, len(prompt.tokens))})
    while (left := len(prompt.tokens) - rig.scheduler.rows[slot].num_computed) > 0:
        rig.step(counts={slot: min(chunk, left)})


def assert_equal_logits(rig: Rig, slot: int, model: Any, prompt: Prompt) -> None:
    rows = torch.stack(rig.logits[slot])
    expected = logits(model, prompt, rig.tokens(slot))[len(prompt.tokens) - 1 :][: len(rows)]
    torch.testing.assert_close(rows[: len(expected)], expected, atol=MAX_ERROR, rtol=MAX_ERROR)
