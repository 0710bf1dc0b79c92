"""Random checkpoints of several families, prompts with pictures, and the answers of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from quire.services.worker.step.fetched_item import FetchedItem, Pixels
from quire.shared.columns import u32, u32_bytes
from quire.shared.media.processor import PlaceholderExpansion, TileLayout, WholePromptProcessor
from quire.shared.media.registry import read_media_processor
from quire.shared.pb.common.v1 import media_pb2
from tests.services.worker.checkpoints import GEMMA3, MINISTRAL3, SHAPE, VOCAB_SIZE

NUM_TOKENS = 6
SIDE, PATCH = 32, 4
BEGIN, SOFT, END, NEWLINES = VOCAB_SIZE - 1, VOCAB_SIZE - 2, VOCAB_SIZE - 3, VOCAB_SIZE - 4
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": PATCH,
}
PIXTRAL = {"model_type": "pixtral", **TOWER, "image_size": SIDE}
FIXED = {"size": {"height": SIDE, "width": SIDE}, "resample": 2}
Text = dict[str, Any]


class Tokens:
    """Tokenizer of the few texts that expansions need."""

    def encode(self, text: str) -> list[int]:
        known = {"[IMG_BREAK]": [BEGIN], "[IMG_END]": [END], "\n\n": [NEWLINES], " ": [5]}
        known |= {"<|START_OF_IMG|>": [BEGIN], "<|END_OF_IMG|>": [END], "<|IMG_LINE_BREAK|>": [NEWLINES]}
        return known.get(text, [7, 8, 9])


class Family(NamedTuple):
    """Checkpoint of transformers with random weights."""

    make: Callable[[], Any]
    preprocessor: dict[str, Any]
    placeholder: int
    sizes: Sequence[tuple[int, int]]  # height and width of pictures
    options: dict[str, Any] = {}  # noqa: RUF012 - read only


def gemma3(**text: Any) -> Any:
    config = transformers.Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", **TOWER, "image_size": SIDE},
        text_config={**SHAPE, **GEMMA3, **text},
        mm_tokens_per_image=16,
        boi_token_index=BEGIN,
        image_token_index=SOFT,
        eoi_token_index=END,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def mistral3(text_type: str = "mistral", **changes: Any) -> Any:
    text = {"model_type": text_type, **SHAPE, "sliding_window": None, "pad_token_id": 0}
    if text_type == "ministral3":
        text["rope_parameters"] = MINISTRAL3
    config = transformers.Mistral3Config(vision_config=PIXTRAL, text_config=text, image_token_index=SOFT, **changes)
    return transformers.Mistral3ForConditionalGeneration(config)


def pixtral(**text: Any) -> Any:
    config = transformers.LlavaConfig(
        vision_config=PIXTRAL,
        text_config={"model_type": "mistral", **SHAPE, "sliding_window": 9, **text},
        image_token_index=SOFT,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration(config)


def lighton_ocr(**changes: Any) -> Any:
    text = {"model_type": "qwen3", **SHAPE}
    config = transformers.LightOnOcrConfig(vision_config=PIXTRAL, text_config=text, image_token_id=SOFT, **changes)
    return transformers.LightOnOcrForConditionalGeneration(config)


def vipllava(**text: Any) -> Any:
    config = transformers.VipLlavaConfig(
        vision_config={"model_type": "clip_vision_model", **TOWER, "num_hidden_layers": 3, "image_size": SIDE},
        text_config={"model_type": "llama", **SHAPE, **text},
        image_token_index=SOFT,
        vision_feature_layer=[-2, 1, 2],
    )
    return transformers.VipLlavaForConditionalGeneration(config)


def got_ocr2(**vision: Any) -> Any:
    """Windows of 3 patches in a layer, and the whole picture in the other."""
    sizes = {"hidden_size": 32, "mlp_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "output_channels": 16}
    tower = {**sizes, "image_size": SIDE, "patch_size": PATCH, "window_size": 3, "global_attn_indexes": [1], **vision}
    config = transformers.GotOcr2Config(
        vision_config=tower, text_config={"model_type": "qwen2", **SHAPE}, image_token_index=SOFT
    )
    return transformers.GotOcr2ForConditionalGeneration(config)


def paligemma(text_type: str = "gemma", **text: Any) -> Any:
    config = transformers.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", **TOWER, "image_size": SIDE, "vision_use_head": False},
        text_config={"model_type": text_type, **SHAPE, **text},
        image_token_index=SOFT,
        projection_dim=SHAPE["hidden_size"],
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def cohere2_vision(**text: Any) -> Any:
    """A model whose logits are not scaled: transformers' class with a tower leaves the scale of the text model out."""
    config = transformers.Cohere2VisionConfig(
        vision_config={"model_type": "siglip_vision_model", **TOWER, "image_size": SIDE},
        text_config={
            "model_type": "cohere2",
            **SHAPE,
            "sliding_window": 9,
            "pad_token_id": 0,
            "logit_scale": 1.0,
            **text,
        },
        image_token_id=SOFT,
        alignment_intermediate_size=64,
    )
    return transformers.Cohere2VisionForConditionalGeneration(config)


ANY = {"size": {"longest_edge": SIDE}, "resample": 3}
CROPS = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 10}
FAMILIES = {
    # its window of 9 is shorter than a picture of 16 tokens, as in vllm#47217 and transformers#46850
    "cohere2-vision": Family(cohere2_vision, {**FIXED, "patch_size": 4}, SOFT, [(40, 50), (20, 20), (100, 30)]),
    "cohere2-vision-uncut": Family(
        cohere2_vision, {**FIXED, "patch_size": 4}, SOFT, [(40, 50), (9, 9)], {"crop_to_patches": False}
    ),
    "got-ocr2": Family(got_ocr2, FIXED, SOFT, [(32, 32), (40, 10)]),
    "paligemma": Family(paligemma, FIXED, SOFT, [(40, 50)]),
    "paligemma2": Family(lambda: paligemma("gemma2", sliding_window=400), FIXED, SOFT, [(40, 50)]),
    "vipllava": Family(vipllava, FIXED, SOFT, [(40, 50), (32, 32)]),
    "gemma3": Family(gemma3, FIXED, BEGIN, [(40, 50), (32, 32)]),
    "gemma3-window": Family(lambda: gemma3(sliding_window=20), FIXED, BEGIN, [(40, 50), (10, 300), (5, 5)]),
    "gemma3-crops": Family(gemma3, FIXED, BEGIN, [(60, 20), (40, 41)], CROPS),
    "lighton-ocr": Family(lighton_ocr, {**ANY, "patch_size": 8}, SOFT, [(32, 32), (64, 20), (9, 50)]),
    "lighton-ocr-odd": Family(lighton_ocr, {**ANY, "patch_size": PATCH}, SOFT, [(31, 25), (12, 60)]),
    "mistral3": Family(mistral3, ANY, SOFT, [(32, 32), (64, 20), (9, 200), (3, 3)]),
    "mistral3-3x3": Family(lambda: mistral3(spatial_merge_size=3), ANY, SOFT, [(30, 17)]),
    "ministral3": Family(lambda: mistral3("ministral3"), ANY, SOFT, [(32, 20), (9, 30)]),
    "pixtral": Family(pixtral, ANY, SOFT, [(16, 12), (3, 40), (9, 9)]),
}


TILED = frozenset({"cohere2_vision", "gemma3", "got_ocr2", "paligemma", "vipllava"})  # all tiles have one size


class Checkpoint(NamedTuple):
    """Saved checkpoint with the model that made it."""

    folder: Path
    model: Any
    family: Family


def save(name: str, folder: Path) -> Checkpoint:
    """Saves the checkpoint with random weights and its processor's file."""
    family = FAMILIES[name]
    torch.manual_seed(3)
    model = family.make().eval()
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    settings = {**family.preprocessor, "image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return Checkpoint(folder, model, family)


class Prompt(NamedTuple):
    """Prompt with pictures, as workers get it and as transformers gets it."""

    tokens: list[int]
    media: tuple[media_pb2.MediaItem, ...]
    items: list[FetchedItem]


def prompt(checkpoint: Checkpoint, *parts: int | tuple[int, int]) -> Prompt:
    """Returns a prompt: a number stands for as many tokens of text, a size for a random picture of it."""
    processor = read_media_processor(checkpoint.folder)
    assert processor is not None
    tokens: list[int] = []
    media, items = [], []
    for part in parts:
        if isinstance(part, int):
            tokens += [(7 * (len(tokens) + i) + 3) % (VOCAB_SIZE - 14) + 10 for i in range(part)]
            continue
        layout = processor.layout(*part, checkpoint.family.options)
        item, expansion = _item(layout, processor.expand(layout, Tokens()), len(tokens), seed=sum(part))
        items.append(item)
        media.append(_message(item, expansion, len(tokens)))
        tokens += expansion.token_ids
    if isinstance(processor, WholePromptProcessor):
        media = [_over_prompt(item, len(tokens)) for item in media]
    return Prompt([token % VOCAB_SIZE for token in tokens], tuple(media), items)


def _over_prompt(item: media_pb2.MediaItem, num_tokens: int) -> media_pb2.MediaItem:
    """Returns the item with all tokens of its prompt."""
    ((start, count),) = u32(item.embedding_runs).reshape(-1, 2).tolist()
    changed = media_pb2.MediaItem(offset=0, length=num_tokens, embedding_runs=u32_bytes([item.offset + start, count]))
    found = media_pb2.MediaItem()
    found.CopyFrom(item)
    found.offset = 0
    found.MergeFrom(changed)
    return found


def _item(
    layout: TileLayout, expansion: PlaceholderExpansion, offset: int, seed: int
) -> tuple[FetchedItem, PlaceholderExpansion]:
    shape = (layout.num_tiles, layout.height, layout.width, 3)
    pixels: Pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    identifier = hashlib.sha256(repr(shape).encode() + pixels.tobytes()).digest()
    return FetchedItem(identifier, expansion.num_embeddings, layout.numbers, pixels), expansion


def _message(item: FetchedItem, expansion: PlaceholderExpansion, offset: int) -> media_pb2.MediaItem:
    return media_pb2.MediaItem(
        identifier=item.identifier,
        offset=offset,
        length=len(expansion.token_ids),
        num_embeddings=item.num_embeddings,
        embedding_runs=u32_bytes([number for run in expansion.runs for number in run]),
        modality="image",
    )


def inputs(checkpoint: Checkpoint, tokens: Sequence[int], items: Sequence[FetchedItem]) -> dict[str, Any]:
    """Returns the inputs of transformers' model."""
    ids = torch.tensor([tokens])
    found: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not items:
        return found
    tiles = [(torch.from_numpy(item.pixels).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD) for item in items]
    sizes = [(tile.size(1), tile.size(2)) for tile in tiles]
    if checkpoint.model.config.model_type in TILED:
        pixels = torch.cat(tiles)
        if checkpoint.model.config.model_type == "gemma3":
            found["token_type_ids"] = (ids == SOFT).long()
        if checkpoint.model.config.model_type == "paligemma":
            found["token_type_ids"] = torch.zeros_like(ids)  # all see each other
    else:
        pixels = torch.zeros(len(tiles), *(max(side) for side in zip(*sizes, strict=True)), 3)
        for place, tile in zip(pixels, tiles, strict=True):
            place[: tile.size(1), : tile.size(2)] = tile[0]
        found["image_sizes"] = torch.tensor(sizes)
    return {**found, "pixel_values": pixels.permute(0, 3, 1, 2)}


def greedy(checkpoint: Checkpoint, asked: Prompt) -> list[int]:
    return greedy_with_logits(checkpoint, asked)[0]


def greedy_with_logits(checkpoint: Checkpoint, asked: Prompt) -> tuple[list[int], torch.Tensor]:
    """Returns the tokens that transformers generates, and the logits of each."""
    model = checkpoint.model
    model.generation_config.eos_token_id = None  # the rig samples on after it
    with torch.inference_mode():
        given = inputs(checkpoint, asked.tokens, asked.items)
        found = model.generate(
            **given, max_new_tokens=NUM_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    return found.sequences[0, len(asked.tokens) :].tolist(), torch.cat(found.logits).float()
