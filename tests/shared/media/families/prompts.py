"""Prompts with pictures for tests of processors: a tokenizer of words, pictures of noise, and their expansion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.shared.media.expansion import expand_placeholders, joins_of
from quire.shared.media.processor import MediaProcessor, TileLayout


class PlainTokenizer:
    """Tokenizer of the processors' port over one of transformers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


@dataclass(frozen=True)
class Expanded:
    """Prompt after the expansion."""

    token_ids: list[int]
    ranges: list[tuple[int, int]]  # offset and length of each picture
    embedded: list[int]  # positions that take rows of embeddings


def word_tokenizer(special: Mapping[str, int], **arguments: Any) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with the words a and b, and special tokens with the given ids."""
    vocabulary = {"<unk>": 0, "a": 1, "b": 2, **special}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **arguments)


def noise(height: int, width: int) -> Image.Image:
    rng = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def expanded(
    processor: MediaProcessor,
    token_ids: Sequence[int],
    layouts: Sequence[TileLayout],
    tokenizer: PreTrainedTokenizerFast,
) -> Expanded:
    """Expands the placeholders of a prompt as frontends do."""
    plain = PlainTokenizer(tokenizer)
    expansions = [processor.expand(layout, plain) for layout in layouts]
    found = expand_placeholders(token_ids, processor.placeholder, expansions, joins_of(processor, plain))
    ranges = [(item.offset, item.length) for item in found.items]
    embedded = [
        item.offset + start + index for item in found.items for start, length in item.runs for index in range(length)
    ]
    return Expanded(list(found.token_ids), ranges, embedded)
