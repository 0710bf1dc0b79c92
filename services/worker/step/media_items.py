"""Media items of a sequence: where the rows of an encoder stand in its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.shared.columns import I32


class RowRun(NamedTuple):
    """Consecutive rows of an item at consecutive positions of a sequence."""

    position: int
    first_row: int
    length: int


@dataclass(frozen=True, slots=True)
class MediaItem:
    """Media item in a sequence (MediaItem of quire/common/v1/media.proto)."""

    identifier: bytes
    offset: int
    length: int
    num_embeddings: int
    runs: tuple[tuple[int, int], ...] = ()  # (start relative to offset, length); empty: the whole range
    modality: str = "image"
    layout: tuple[int, ...] = ()
    is_attended: bool = False  # the decoder attends to the rows, and none stands at a position

    def __post_init__(self) -> None:
        """Raises ValueError for runs that are outside of the range, overlap, or do not hold num_embeddings rows."""
        if self.is_attended:
            if self.runs or self.num_embeddings < 1:
                raise ValueError(f"embedding_runs: {self.num_embeddings} rows to attend to, {self.runs} at positions")
            return
        end = 0
        for start, length in self.row_runs:
            if start < end or length < 1:
                raise ValueError(f"embedding_runs: {self.runs} are not ascending and apart")
            end = start + length
        count = sum(length for _, length in self.row_runs)
        if end > self.length or count != self.num_embeddings or count < 1:
            text = f"{count} rows up to {end}, of {self.num_embeddings} rows in {self.length} tokens"
            raise ValueError(f"embedding_runs: {text}")

    @property
    def row_runs(self) -> tuple[tuple[int, int], ...]:
        """Runs of positions, relative to `offset`, that take rows."""
        return () if self.is_attended else self.runs or ((0, self.length),)

    @property
    def end(self) -> int:
        """Position after the last token of the range."""
        return self.offset + self.length

    def rows_in(self, begin: int, end: int) -> Iterator[RowRun]:
        """Yields the rows that stand at the positions from `begin` to `end` (exclusive)."""
        first_row = 0
        for start, length in self.row_runs:
            at = self.offset + start
            low, high = max(at, begin), min(at + length, end)
            if low < high:
                yield RowRun(low, first_row + low - at, high - low)
            first_row += length


def without_unknown_placeholders(tokens: I32, items: Iterable[MediaItem], vocab_size: int) -> I32:
    """Returns the tokens with 0 in the place of ids that the vocabulary lacks, where rows of `items` stand; `tokens`
    itself if there are none."""
    unknown = (tokens < 0) | (tokens >= vocab_size)
    if not unknown.any():
        return tokens
    covered = np.zeros(len(tokens), dtype=np.bool_)
    for item in items:
        for position, _, count in item.rows_in(0, len(tokens)):
            covered[position : position + count] = True
    return np.where(unknown & covered, 0, tokens).astype(np.int32)


def last_row_end(items: Sequence[MediaItem]) -> int:
    """Returns the position after the last row of `items`; 0 without items."""
    return max((item.offset + sum(item.row_runs[-1]) for item in items if item.row_runs), default=0)
