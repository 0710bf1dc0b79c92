"""PaliGemma's item is the whole prompt, whose tokens see each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.media.expansion import ExpandedItem, expand_placeholders, over_the_prompt
from quire.shared.media.processor import WholeItemProcessor, WholePromptProcessor
from tests.shared.media.families.tiled import byte_tokenizer, opened, written

SIDE, IMAGE = 56, 300
PICTURES = {"size": {"height": SIDE, "width": SIDE}, "resample": 3}
CONFIG = {
    "model_type": "paligemma", "image_token_index": IMAGE,
    "vision_config": {"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": 14},
}  # fmt: skip


def test_the_item_is_the_whole_prompt(tmp_path: Path) -> None:
    processor = opened(written(tmp_path, CONFIG, PICTURES))
    assert isinstance(processor, WholePromptProcessor)
    assert isinstance(processor, WholeItemProcessor)
    assert processor.max_item_tokens > processor.max_embeddings == 16
    expansion = processor.expand(processor.layout(99, 9, {}), byte_tokenizer([]))
    prompt = over_the_prompt(expand_placeholders([5, IMAGE, 6, 7], IMAGE, [expansion]))
    assert prompt.token_ids == [5, *[IMAGE] * 16, 6, 7]
    assert prompt.items == [ExpandedItem(0, 19, ((1, 16),))]


def test_a_prompt_has_one_picture(tmp_path: Path) -> None:
    processor = opened(written(tmp_path, CONFIG, PICTURES))
    expansion = processor.expand(processor.layout(9, 9, {}), byte_tokenizer([]))
    with pytest.raises(InvalidArgument, match=r"At most 1 image\(s\).*This prompt has 2"):
        over_the_prompt(expand_placeholders([IMAGE, IMAGE], IMAGE, [expansion] * 2))


def test_text_alone_has_no_item() -> None:
    assert over_the_prompt(expand_placeholders([1, 2], IMAGE, [])).items == []
