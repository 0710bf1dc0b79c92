"""Token ids to vectors, and vectors to logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from services.worker.layers.linear import Linear, Projection
from services.worker.layers.sharding import WHOLE, portion

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.layers.placement import Destination, Placement
    from services.worker.layers.sharding import Shard
    from services.worker.lora.linear_adapters import LinearAdapters


class Embedding:
    """A row for each token id."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        place: Placement,
        scale: float = 1.0,
        *,
        sharded: bool = True,
    ) -> None:
        """`scale`: what vectors are multiplied by. `sharded`: each rank has rows of its own, if there are several."""
        self._name, self._scale = name, scale
        self._ops, self._shard = place.ops, place.shard if sharded else WHOLE
        self.vocab_size, self.rows = vocab_size, self._shard.rows(vocab_size)
        self.table: Tensor = place.empty(self._shard.room(vocab_size), hidden_size)
        self.table[len(self.rows) :] = 0

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", portion(self.table[: len(self.rows)], 0, (self.rows,), self.vocab_size)

    def finish(self) -> None:
        if self._scale != 1:
            self.table *= self._scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._shard.is_whole:
            return self._ops.embed(token_ids, self.table)
        places = token_ids - self.rows.start
        is_here = (places >= 0) & (places < len(self.rows))
        found: Tensor = self._ops.embed(places * is_here, self.table)
        return self._shard.collectives.add_up(found * is_here.unsqueeze(1))


class OutputHead(Linear):
    """Logits by a projection of its own."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement, name: str = "lm_head") -> None:
        rows, place = place.shard.rows(vocab_size), replace(place, adapters=None)  # rows here are no step's tokens
        super().__init__([Projection(name, vocab_size, taken=(rows,))], hidden_size, False, place, quantized=False)
        self._vocab_size, self._missing = vocab_size, place.shard.room(vocab_size) - len(rows)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size], on all ranks"""
        return self.of_all_ranks(super().__call__(x))

    def of_all_ranks(self, logits: Tensor) -> Tensor:
        """Of the vocabulary, from what each rank has."""
        return _gathered(logits, self._shard, self._vocab_size, self._missing)


class TiedOutputHead:
    """Logits by the embedding's table. Some checkpoints repeat it as lm_head.weight: loader.py passes over that."""

    def __init__(self, embedding: Embedding, place: Placement) -> None:
        self._embedding = embedding
        self._ops, self._shard = place.ops, place.shard
        self.packed: Any = None  # as the ops want it, once loaded
        self.adapters: LinearAdapters | None = None

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from ()

    def finish(self) -> None:
        self.packed = self._ops.prepare_linear(self._embedding.table, None)

    def __call__(self, x: Tensor) -> Tensor:
        return self.of_all_ranks(self._ops.linear(x, self.packed))

    def of_all_ranks(self, logits: Tensor) -> Tensor:
        """Of the vocabulary, from what each rank has."""
        return _gathered(logits, self._shard, self._embedding.vocab_size)


def _gathered(logits: Tensor, shard: Shard, vocab_size: int, missing: int = 0) -> Tensor:
    """Those of all ranks, from each one's; this rank has `missing` fewer than the first."""
    from torch.nn import functional

    if shard.is_whole:
        return logits
    if missing:
        logits = functional.pad(logits, (0, missing))
    gathered = shard.collectives.side_by_side(logits)
    return gathered if gathered.size(1) == vocab_size else gathered[:, :vocab_size].contiguous()
