"""Which tokens are here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.services.worker.layers.sharding import Shard
from quire.shared.columns import I32


@dataclass(frozen=True, slots=True)
class VocabShard:
    """`count` tokens of the vocabulary from `first` on. Logits have `size` columns, as many on every rank: those behind
    the tokens are padding, -inf."""

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
        """Which of these are here; to be found at token id - first."""
        here: npt.NDArray[np.bool_] = (token_ids >= self.first) & (token_ids < self.first + self.count)
        return here

    def local_columns(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each, int64, and whether it is here; if not, the column is any. -1 is nowhere."""
        places = token_ids.long() - self.first
        inside = places.clamp(min=0, max=self.size - 1)
        return inside, places == inside
