"""PaliGemma (arXiv 2407.07726): pictures of one size, and one token for each patch. All tokens of the prompt see each
other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.shared.media.families.llava import LlavaProcessor, read_fixed_pictures

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MOST_TEXT = 512  # tokens of a prompt's text that a step has room for, whatever max_num_batched_tokens is


class PaliGemmaProcessor(LlavaProcessor):
    """Resizes every picture to the tower's input size; the item of a prompt is the whole prompt."""

    covers_prompt = True

    @property
    def max_item_tokens(self) -> int:
        return self.max_embeddings + MOST_TEXT


def make_paligemma(folder: Path, config: Mapping[str, Any]) -> PaliGemmaProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    return PaliGemmaProcessor(*read_fixed_pictures(folder, config))
