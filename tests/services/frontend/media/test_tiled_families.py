"""Chats with pictures of families that cut them into tiles: the prompt that schedulers get has the family's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image
from tokenizers import AddedToken

from quire.shared.columns import i32, u32
from tests.services.frontend.media.fetching import fetch_pixels
from tests.services.frontend.media.seeing import image, seeing_frontend, text
from tests.services.frontend.media.seeing_folder import PARTS, png
from tests.services.frontend.tiny_folder import byte_level_tokenizer, write_folder

SIDE = 28
SIZE = {"height": SIDE, "width": SIDE}
WIDE = png(Image.new("RGB", (2 * SIDE, SIDE), (250, 10, 10)))


class TiledModel(NamedTuple):
    """Model, and what it makes of a picture of 28 x 56 pixels."""

    architecture: str
    placeholder: str
    special: tuple[str, ...]
    pictures: dict[str, Any]
    expansion: str
    num_tiles: int


AROUND, ROW = "<fake_token_around_image>", "<image>" * 4
PATCHES = "<|patch|>" * 4
FAMILIES = {
    "internvl": TiledModel(
        "InternVLForConditionalGeneration", "<IMG_CONTEXT>", ("<img>", "</img>"), {"size": SIZE},
        f"<img>{'<IMG_CONTEXT>' * 12}</img>", 3,
    ),
    "idefics3": TiledModel(
        "Idefics3ForConditionalGeneration", "<image>", (AROUND, "<row_1_col_1>", "<row_1_col_2>", "<global-img>"),
        {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
        f"{AROUND}<row_1_col_1>{ROW}{AROUND}<row_1_col_2>{ROW}\n\n{AROUND}<global-img>{ROW}{AROUND}", 3,
    ),
    "llama4": TiledModel(
        "Llama4ForConditionalGeneration", "<|image|>",
        ("<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        {"size": SIZE},
        f"<|image_start|>{PATCHES}<|tile_x_separator|>{PATCHES}<|tile_y_separator|><|image|>{PATCHES}<|image_end|>", 3,
    ),
    "llava_next": TiledModel(
        "LlavaNextForConditionalGeneration", "<image>", (), {"size": SIZE, "image_grid_pinpoints": [[28, 56]]},
        "<image>" * (16 + 4 * 9), 3,
    ),
    "phi4_multimodal": TiledModel(
        "Phi4MultimodalForCausalLM", "<|image|>", (), {"size": SIZE}, "<|image|>" * (2 * 5 + 1 + 2 * 3), 2,
    ),
}  # fmt: skip


def written(family: str, folder: Path) -> Path:
    seen, tokenizer = FAMILIES[family], byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in (seen.placeholder, *seen.special)])
    image_token = "<|patch|>" if family == "llama4" else seen.placeholder
    number = tokenizer.token_to_id(image_token)
    text_config = {
        "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096,
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    }  # fmt: skip
    write_folder(
        folder,
        tokenizer=tokenizer,
        chat_template=PARTS.replace("<image>", seen.placeholder),
        architectures=[seen.architecture],
        model_type=family,
        image_token_id=number,
        vision_config={"image_size": SIDE, "patch_size": 7, "image_token_id": number},
        **(text_config if family == "phi4_multimodal" else {"text_config": {"model_type": "qwen3", **text_config}}),
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(seen.pictures))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_chat_with_two_pictures(family: str, tmp_path: Path) -> None:
    seen = FAMILIES[family]
    content = [text("before"), image(WIDE), text("between"), image(WIDE), text("after")]
    async with seeing_frontend(written(family, tmp_path)) as served:
        asked = served.ask("/v1/chat/completions", messages=[{"role": "user", "content": content}])
        submission = await served.submission(0, asked)
        tokenizer, ids = served.started.frontend.model.tokenizer, i32(submission.token_ids).tolist()
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        assert f"before{seen.expansion}between{seen.expansion}after" in shown
        for item in submission.media:
            expansion = ids[item.offset : item.offset + item.length]
            assert tokenizer.decode(expansion, skip_special_tokens=False) == seen.expansion
            runs = u32(item.embedding_runs).tolist() or [0, item.length]
            rows = [expansion[begin : begin + count] for begin, count in zip(runs[::2], runs[1::2], strict=True)]
            assert sum(map(len, rows)) == item.num_embeddings
            assert len({token for row in rows for token in row}) == 1
            head, pixels = await fetch_pixels(served.media_address, item.identifier)
            assert (head.num_tiles, head.height, head.width) == (seen.num_tiles, SIDE, SIDE)
            assert pixels[:3] == bytes((250, 10, 10))
        served.script.resume()
        assert (await asked).status_code == 200
