"""Random checkpoints of families that cut pictures into tiles, prompts with pictures, and answers of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image

from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.columns import u32_bytes
from quire.shared.media.processor import MediaProcessor
from quire.shared.pb.common.v1 import media_pb2
from tests.services.worker.checkpoints import LLAMA4, SHAPE, VOCAB_SIZE
from tests.services.worker.media.families import NUM_TOKENS
from tests.services.worker.media.pictures import identifier_of

SIDE = 28
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": SIDE,
    "patch_size": 7,
}  # fmt: skip
ADAPTER = {"intermediate_size": 128, "vision_output_dim": 40, "projector_input_dim": 40, "projector_output_dim": 40}
CANVASES = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84], [112, 112]]
ANYRES = {"image_grid_pinpoints": CANVASES, "size": {"height": SIDE, "width": SIDE}}
IMAGE = VOCAB_SIZE - 1  # takes rows; the template's placeholder, except for Llama 4
FIRST_SPECIAL = 150
SIZES = [(40, 90), (28, 28), (200, 61), (5, 3)]
TEXT = {**SHAPE, "max_position_embeddings": 1024}
AUDIO = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2},
    **{"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 8},
}
QWEN2 = {"model_type": "qwen2", **TEXT, "head_dim": 8}
LLAMA = {"model_type": "llama", **TEXT}


class Family(NamedTuple):
    name: str  # of the class in transformers
    config: Callable[[], Any]
    pictures: dict[str, Any]  # of preprocessor_config.json


FAMILIES = {
    "internvl": Family(
        "InternVLForConditionalGeneration",
        lambda: transformers.InternVLConfig(
            text_config=QWEN2, vision_config={**TOWER, "attention_bias": True}, image_token_id=IMAGE
        ),
        {"size": {"height": SIDE, "width": SIDE}, "max_patches": 4},
    ),
    "llava_next": Family(
        "LlavaNextForConditionalGeneration",
        lambda: transformers.LlavaNextConfig(
            text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
            vision_config={"model_type": "clip_vision_model", "projection_dim": 16, **TOWER},
            image_token_index=IMAGE, image_grid_pinpoints=CANVASES,
        ),
        ANYRES,
    ),
    "llava_onevision": Family(
        "LlavaOnevisionForConditionalGeneration",
        lambda: transformers.LlavaOnevisionConfig(
            text_config=QWEN2, vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
            image_token_index=IMAGE, image_grid_pinpoints=CANVASES, vision_aspect_ratio="anyres_max_3",
        ),
        ANYRES,
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        lambda: transformers.Idefics3Config(text_config=LLAMA, vision_config=TOWER, image_token_id=IMAGE),
        {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
    ),
    "smolvlm": Family(
        "SmolVLMForConditionalGeneration",
        lambda: transformers.SmolVLMConfig(
            text_config=LLAMA, vision_config=TOWER, image_token_id=IMAGE, scale_factor=4
        ),
        {"size": {"longest_edge": 3 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
    ),
    "phi4_multimodal": Family(
        "Phi4MultimodalForCausalLM",
        lambda: transformers.Phi4MultimodalConfig(
            **{**TEXT, "head_dim": 8}, pad_token_id=0, audio_config=AUDIO,
            vision_config={**TOWER, "crop_size": SIDE, "image_token_id": IMAGE},
        ),
        {"size": {"height": SIDE, "width": SIDE}, "dynamic_hd": 4},
    ),
    "llama4": Family(
        "Llama4ForConditionalGeneration",
        lambda: transformers.Llama4Config(
            text_config={**TEXT, **LLAMA4, "attention_chunk_size": 64, "pad_token_id": 0},
            vision_config={**TOWER, **ADAPTER}, image_token_index=IMAGE,
        ),
        {"size": {"height": SIDE, "width": SIDE}, "max_patches": 4},
    ),
}  # fmt: skip


class SpecialTokens:
    """Tokenizer in which every text is one token, numbered as they come."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._known.setdefault(text, FIRST_SPECIAL + len(self._known))]


class Question(NamedTuple):
    tokens: list[int]
    media: tuple[media_pb2.MediaItem, ...]
    items: list[FetchedItem]


def saved(family: str, folder: Path) -> Any:
    """Saves a checkpoint with random weights and its processor's file; returns the model of transformers."""
    made = FAMILIES[family]
    config = made.config()
    model = getattr(transformers, made.name)(config).eval()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(8)
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(made.pictures))
    added = {str(FIRST_SPECIAL - 1): {"content": "<|image|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return model


def asked(processor: MediaProcessor, sizes: list[tuple[int, int]]) -> Question:
    """Returns a prompt of text, pictures of noise with text between them, and text."""
    tokens, media, items, tokenizer = [3, 14, 15], [], [], SpecialTokens()
    for seed, (height, width) in enumerate(sizes):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        layout = processor.layout(height, width, {})
        tiles = processor.render(Image.fromarray(pixels), layout)
        expansion = processor.expand(layout, tokenizer)
        num_rows = expansion.num_embeddings
        items.append(FetchedItem(identifier_of(tiles), num_rows, layout.numbers, tiles))
        media.append(
            media_pb2.MediaItem(
                identifier=identifier_of(tiles), offset=len(tokens), length=len(expansion.token_ids),
                num_embeddings=num_rows, embedding_runs=u32_bytes([n for run in expansion.runs for n in run]),
                modality="image", layout=u32_bytes(layout.numbers),
            )
        )  # fmt: skip
        tokens += [*expansion.token_ids, 9, 26]
    return Question(tokens, tuple(media), items)


def inputs_of(family: str, processor: MediaProcessor, question: Question, sizes: list[tuple[int, int]]) -> Any:
    """Returns what transformers' processor hands to the model beside the tokens."""
    mean, std, factor = processor.normalization
    tiles = [
        ((torch.from_numpy(item.pixels.copy()).float() * factor - torch.tensor(mean)) / torch.tensor(std)).permute(
            0, 3, 1, 2
        )
        for item in question.items
    ]
    if family.startswith("llava"):
        padded = torch.nn.utils.rnn.pad_sequence(tiles, batch_first=True)
        return {"pixel_values": padded, "image_sizes": torch.tensor(sizes)}
    if family == "phi4_multimodal":
        return padded_inputs(tiles, [item.layout for item in question.items])
    pixels = torch.cat(tiles)
    return {"pixel_values": pixels[None] if family in ("idefics3", "smolvlm") else pixels}


def padded_inputs(tiles: list[torch.Tensor], layouts: list[tuple[int, ...]]) -> Any:
    """Returns the inputs of Phi-4-multimodal: the whole picture before its tiles, and which patches show it."""
    side = SIDE // 7
    pixels, masks, sizes = [], [], []
    for each, (rows, columns, shown_rows, shown_columns) in zip(tiles, layouts, strict=True):
        grid = each.view(rows, columns, 3, SIDE, SIDE).permute(2, 0, 3, 1, 4).reshape(1, 3, rows * SIDE, columns * SIDE)
        pixels.append(torch.cat((torch.nn.functional.interpolate(grid, (SIDE, SIDE), mode="bicubic"), each)))
        mask = torch.zeros(rows * side, columns * side)
        mask[:shown_rows, :shown_columns] = 1
        masks.append(mask.view(rows, side, columns, side).transpose(1, 2).reshape(-1, side, side))
        sizes.append([rows * SIDE, columns * SIDE])
    masks = [torch.cat((torch.ones(1, side, side), mask)) for mask in masks]
    return {
        "image_pixel_values": torch.nn.utils.rnn.pad_sequence(pixels, batch_first=True),
        "image_attention_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True, padding_value=1),
        "image_sizes": torch.tensor(sizes),
    }


def logits_of(model: Any, ids: torch.Tensor, inputs: Any) -> torch.Tensor:
    """Computes logits. The forward of Llama 4's multimodal class in transformers 5.24 fails with and without pictures:
    its parts are called one by one."""
    if model.config.model_type != "llama4":
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
        return logits
    embeddings = model.get_input_embeddings()(ids)
    if not inputs:
        text: torch.Tensor = model.language_model(input_ids=ids, use_cache=False).logits
        return text
    rows = model.multi_modal_projector(model.vision_model(**inputs, return_dict=True).last_hidden_state)
    embeddings[ids == IMAGE] = rows.flatten(0, 1)
    logits = model.language_model(inputs_embeds=embeddings, use_cache=False).logits
    return logits


def answer_of_transformers(model: Any, tokens: list[int], inputs: Any) -> list[int]:
    """Generates greedily, each token from the whole sequence."""
    ids = list(tokens)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            ids.append(int(logits_of(model, torch.tensor([ids]), inputs)[0, -1].argmax()))
    return ids[len(tokens) :]
