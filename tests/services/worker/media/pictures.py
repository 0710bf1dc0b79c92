"""Small random LLaVA checkpoints, random pictures, and a rig that encodes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers

from quire.services.worker.step.fetched_item import FetchedItem, Pixels
from quire.shared.columns import u32_bytes
from quire.shared.pb.common.v1 import media_pb2
from tests.services.worker.checkpoints import FAMILIES, SHAPE, VOCAB_SIZE
from tests.services.worker.rig import Rig

SIDE, PATCH = 28, 7
NUM_ROWS = (SIDE // PATCH) ** 2
PLACEHOLDER = VOCAB_SIZE - 1
TOWERS: dict[str, dict[str, Any]] = {
    "clip": {"model_type": "clip_vision_model", "projection_dim": 16},
    "siglip": {"model_type": "siglip_vision_model", "vision_use_head": False},
}
PREPROCESSOR = {
    **{"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "resample": 3},
    **{"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "do_center_crop": True},
    **{"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]},
}


def make_llava(
    folder: Path,
    text: str = "llama",
    tower: str = "clip",
    text_changes: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 7,
    **changes: Any,
) -> Any:
    """Saves a checkpoint with random weights and its processor's file; returns the model of transformers."""
    prefix, extra = FAMILIES[text]
    text_config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **extra, **text_changes})
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config={**sizes, "image_size": SIDE, "patch_size": PATCH, **TOWERS[tower]},
        text_config=text_config,
        vision_feature_select_strategy="default" if tower == "clip" else "full",
        **{"image_token_id": PLACEHOLDER, "image_seq_length": NUM_ROWS, **changes},
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return model


def picture(seed: int, side: int = SIDE) -> Pixels:
    """Returns random pixels, uint8 [1, side, side, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (1, side, side, 3), dtype=np.uint8)


def identifier_of(pixels: Pixels) -> bytes:
    return hashlib.sha256(pixels.tobytes()).digest()


def prompt_with(*parts: int | Pixels, placeholder: int = PLACEHOLDER) -> tuple[list[int], list[media_pb2.MediaItem]]:
    """Returns the tokens and the items of a prompt: a number stands for as many tokens of text."""
    tokens: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            tokens += [(7 * (len(tokens) + i) + 3) % (VOCAB_SIZE - 5) for i in range(part)]
            continue
        identifier = identifier_of(part)
        items.append(
            media_pb2.MediaItem(
                identifier=identifier,
                offset=len(tokens),
                length=NUM_ROWS,
                num_embeddings=NUM_ROWS,
                embedding_runs=u32_bytes([0, NUM_ROWS]) if len(items) % 2 else b"",
                modality="image",
            )
        )
        tokens += [placeholder] * NUM_ROWS
    return tokens, items


def encode(rig: Rig, *pictures: Pixels) -> None:
    """Encodes pictures, all in one batch."""
    with torch.inference_mode():
        batch = rig.replica.media.encode([fetched(one) for one in pictures])
    batch.wait()
    assert batch.errors == (None,) * len(pictures), batch.errors


def fetched(pixels: Pixels, num_embeddings: int = NUM_ROWS) -> FetchedItem:
    return FetchedItem(identifier_of(pixels), num_embeddings, (), pixels)


def normalized(pictures: list[Pixels]) -> torch.Tensor:
    """Returns the pixel values that transformers' model gets."""
    mean, std = (torch.tensor(PREPROCESSOR[key]) for key in ("image_mean", "image_std"))
    pixels = torch.from_numpy(np.concatenate(pictures)).float() / 255
    return ((pixels - mean) / std).permute(0, 3, 1, 2)


def greedy(model: Any, tokens: list[int], pictures: list[Pixels], count: int, num_beams: int = 1) -> list[int]:
    """Returns the tokens that transformers generates."""
    ids = torch.tensor([tokens])
    model.generation_config.eos_token_id = None  # the rig samples on after it
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **({"pixel_values": normalized(pictures)} if pictures else {}),
            max_new_tokens=count,
            do_sample=False,
            num_beams=num_beams,
        )
    return found[0, len(tokens) :].tolist()


def expected_logits(model: Any, tokens: list[int], pictures: list[Pixels]) -> torch.Tensor:
    """Returns the logits of transformers, [num_tokens, vocab_size]."""
    with torch.inference_mode():
        pixels = normalized(pictures) if pictures else None
        return model(input_ids=torch.tensor([tokens]), pixel_values=pixels).logits[0].float()
