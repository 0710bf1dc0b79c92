"""Pictures, tokenizers and folders for tests of processors that cut pictures into tiles."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.shared.media.processor import MediaProcessor, TileLayout
from quire.shared.media.registry import read_media_processor

# Square, wide, tall, tiny, elongated, and larger than any canvas.
SIZES = [
    (56, 56),
    (57, 56),
    (84, 300),
    (300, 84),
    (170, 171),
    (480, 640),
    (641, 479),
    (1, 1),
    (3, 2),
    (7, 400),
    (400, 9),
]


class TextTokenizer:
    """Tokenizer of the processors' port over one of transformers."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.whole = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self.whole(text, add_special_tokens=False).input_ids)


def byte_tokenizer(special: Sequence[str], **arguments: Any) -> TextTokenizer:
    """Returns a byte-level tokenizer that has one token for two line breaks, and special tokens from 300 on."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    vocabulary |= {f"<unused_{index}>": index for index in range(len(vocabulary), 300)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **arguments))


def noise(height: int, width: int) -> Image.Image:
    rng = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def written(
    folder: Path, config: Mapping[str, Any], pictures: Mapping[str, Any], tokenizer: TextTokenizer | None = None
) -> Path:
    """Writes the files of a model that its processor is read from."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    if tokenizer is not None:
        tokenizer.whole.save_pretrained(folder)
    return folder


def opened(folder: Path) -> MediaProcessor:
    found = read_media_processor(folder)
    assert found is not None
    return found


def normalized(processor: MediaProcessor, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.float32]:
    """Renders a picture and normalizes its tiles as workers do, [num_tiles, 3, height, width]."""
    tiles = processor.render(picture, layout)
    assert tiles.shape == (layout.num_tiles, layout.height, layout.width, 3)
    mean, std, factor = processor.normalization
    return ((tiles.astype(np.float32) * factor - mean) / std).transpose(0, 3, 1, 2)


def expanded(
    processor: MediaProcessor, tokens: Sequence[int], layouts: Sequence[TileLayout], tokenizer: TextTokenizer
) -> tuple[list[int], list[int]]:
    """Returns a prompt with its placeholders replaced in order, and the positions that take rows."""
    found: list[int] = []
    positions: list[int] = []
    pending = iter(layouts)
    for token in tokens:
        if token != processor.placeholder:
            found.append(token)
            continue
        expansion = processor.expand(next(pending), tokenizer)
        assert expansion.num_embeddings <= processor.max_embeddings
        positions += [len(found) + start + i for start, length in expansion.runs for i in range(length)]
        found += expansion.token_ids
    return found, positions
