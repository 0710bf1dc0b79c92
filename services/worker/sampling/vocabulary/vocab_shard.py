"""The range of the vocabulary that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.services.worker.layers.sharding import Shard
from quire.shared.columns import I32


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Range of the vocabulary that a rank holds: `count` tokens starting at `first`. Logits have `size` columns on
    every rank; those after the tokens are padding, -inf."""

    vocab_size: int
    first: int
    count: int
    size: int

    @classmethod
    def for_rank(cls, shard: Shard, vocab_size: int) -> VocabShard:
        rows = shard.rows(vocab_size)
        return cls(vocab_size, rows.start, len(rows), shard.room(vocab_size))

    @classmethod
    def unsharded(cls, vocab_size: int) -> VocabShard:
        return cls(vocab_size, 0, vocab_size, vocab_size)

    @property
    def is_whole(self) -> bool:
        return self.count == self.vocab_size

    def has(self, token_ids: I32) -> npt.NDArray[np.bool_]:
        """Returns which token ids lie in this shard, bool of the same shape; the column of id i is i - first."""
        is_local: npt.NDArray[np.bool_] = (token_ids >= self.first) & (token_ids < self.first + self.count)
        return is_local

    def local_columns(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the column of each id, int64, and whether it lies in this shard; other columns are arbitrary. -1 lies
        in none."""
        columns = token_ids.long() - self.first
        clamped = columns.clamp(min=0, max=self.size - 1)
        return clamped, columns == clamped
