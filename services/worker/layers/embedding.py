"""Token embedding and output heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quire.services.worker.layers.linear import Linear, Projection, adapted_shape
from quire.services.worker.layers.sharding import WHOLE, portion

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.reference.low_rank import AdaptedRows
    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.layers.sharding import Shard
    from quire.services.worker.lora.adapters import AdapterManager
    from quire.services.worker.lora.linear_adapters import LayerShape, LinearAdapters
    from quire.services.worker.lora.vocabulary_adapters import EmbeddingAdapters

NO_TOKEN = float("-inf")


class Embedding:
    """Token embedding table; ranks hold parts of its rows, and the vectors are all-reduced."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        place: LayerPlacement,
        scale: float = 1.0,
        *,
        sharded: bool = True,
        adapted: bool = False,
    ) -> None:
        """Allocates this rank's rows of the table; rows past the vocabulary are zero.

        `scale`: factor of the vectors, folded into the table. `sharded`: each rank holds a part of the rows, else all.
        `adapted`: adapters may add to it.
        """
        self._name, self._scale = name, scale
        self._ops, self._shard = place.ops, place.shard if sharded else WHOLE
        self.vocab_size, self.rows = vocab_size, self._shard.rows(vocab_size)
        self.table: Tensor = place.empty(self._shard.room(vocab_size), hidden_size)
        self.table[len(self.rows) :] = 0
        # Adapter weights; None: no adapters.
        self.adapters: EmbeddingAdapters | None = None
        if adapted and place.adapters is not None:
            shape = adapted_shape([Projection(name, hidden_size)], vocab_size, self.rows)
            self.adapters = place.adapters.for_embedding(shape, self._products)

    @property
    def scale(self) -> float:
        """Factor of all vectors, applied at load."""
        return self._scale

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", portion(self.table[: len(self.rows)], 0, (self.rows,), self.vocab_size)

    def finish(self) -> None:
        if self._scale != 1:
            self.table *= self._scale
        if self.adapters is not None:
            self.adapters.scale(self._scale)
            self.adapters.finish()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Embeds token ids: int32 [num_tokens] -> [num_tokens, hidden_size] on all ranks, without adapters."""
        return self._embed(token_ids, None)

    def embed_step(self, token_ids: Tensor) -> Tensor:
        """Embeds all tokens of the current step, including the adapters of their rows; result in new memory."""
        return self._embed(token_ids, self.adapters)

    def _embed(self, token_ids: Tensor, adapters: EmbeddingAdapters | None) -> Tensor:
        """Looks up the tokens in this rank's rows, adds adapters, and all-reduces if other ranks have rows."""
        places, is_here = token_ids, None
        if not self._shard.is_whole:
            places = token_ids - self.rows.start
            is_here = (places >= 0) & (places < len(self.rows))
            places = places * is_here
        embedded: Tensor = self._ops.embed(places, self.table)
        if adapters is not None:
            adapters.add(places, embedded)
        return embedded if is_here is None else self._shard.collectives.all_reduce(embedded * is_here.unsqueeze(1))

    def _products(self, x: Tensor) -> Tensor:
        """Returns this rank's logits of x [num_rows, hidden_size], for adapters of the table."""
        return x @ self.table[: len(self.rows)].t()


class OutputHead(Linear):
    """Output head with its own projection; never quantized at load."""

    def __init__(self, vocab_size: int, hidden_size: int, place: LayerPlacement, name: str = "lm_head") -> None:
        rows = place.shard.rows(vocab_size)
        super().__init__([Projection(name, vocab_size, taken=(rows,))], hidden_size, False, place, quantized=False)
        self._vocab_size, self._missing = vocab_size, place.shard.room(vocab_size) - len(rows)

    def _adapters_of(self, adapters: AdapterManager, shape: LayerShape) -> LinearAdapters | None:
        return adapters.for_output_head(shape, self._product)

    def __call__(self, x: Tensor, rows: AdaptedRows | None = None) -> Tensor:
        """Computes logits: [num_rows, hidden_size] -> [num_rows, tokens of this rank].

        `rows`: which rows have an adapter; None: none has.
        """
        logits = self._product(x)
        if rows is not None and self.adapters is not None:
            self.adapters.add_to(rows, x, logits)
        return logits

    def pad_vocab(self, logits: Tensor) -> Tensor:
        """Appends columns of -inf, so that all ranks have equally many; returns `logits` itself if none is missing."""
        if not self._missing:
            return logits
        from torch.nn import functional

        return functional.pad(logits, (0, self._missing), value=NO_TOKEN)

    def all_gather_vocab(self, logits: Tensor) -> Tensor:
        """Gathers the padded logits of all ranks and cuts the padding: [num_rows, vocab_size] on all ranks."""
        return _gathered(logits, self._shard, self._vocab_size)


class TiedOutputHead:
    """Output head that uses the embedding table and loads no tensor of its own.

    Some checkpoints repeat it as lm_head.weight, which loader.py ignores.
    """

    def __init__(self, embedding: Embedding, place: LayerPlacement, name: str = "lm_head") -> None:
        """Ties the head to `embedding`; adapters use `name`."""
        self._embedding = embedding
        self._ops, self._shard = place.ops, place.shard
        self.packed: Any = None  # packed by the ops once loaded
        # Adapter weights of the head alone, not of the embedding; None: no adapters.
        self.adapters: LinearAdapters | None = None
        if place.adapters is not None:
            room, size = embedding.table.shape
            taken = range(embedding.rows.start, embedding.rows.start + room)
            shape = adapted_shape([Projection(name, embedding.vocab_size, taken=(taken,))], size, range(size))
            self.adapters = place.adapters.for_output_head(shape, self._product)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from ()

    def finish(self) -> None:
        self.packed = self._ops.prepare_linear(self._embedding.table, None)
        if self.adapters is not None:
            self.adapters.scale(self._embedding.scale)
            self.adapters.finish()

    def _product(self, x: Tensor) -> Tensor:
        """Computes this rank's logits [num_rows, allocated rows] without adapters and without masking the padding."""
        return self._ops.linear(x, self.packed)

    def __call__(self, x: Tensor, rows: AdaptedRows | None = None) -> Tensor:
        """Computes logits as OutputHead, but already with the columns that pad_vocab() sets to -inf."""
        logits = self._product(x)
        if rows is not None and self.adapters is not None:
            self.adapters.add_to(rows, x, logits)
        return logits

    def pad_vocab(self, logits: Tensor) -> Tensor:
        """Sets the columns past this rank's tokens to -inf, in place."""
        count = len(self._embedding.rows)
        if count < logits.size(1):
            logits[:, count:] = NO_TOKEN
        return logits

    def all_gather_vocab(self, logits: Tensor) -> Tensor:
        """Gathers the logits of all ranks and cuts the padding: [num_rows, vocab_size] on all ranks."""
        return _gathered(logits, self._shard, self._embedding.vocab_size)


def _gathered(logits: Tensor, shard: Shard, vocab_size: int) -> Tensor:
    """Concatenates the columns of all ranks and cuts them to `vocab_size`; returns `logits` itself on a single rank."""
    if shard.is_whole:
        return logits
    gathered = shard.collectives.all_gather_columns(logits)
    return gathered if gathered.size(1) == vocab_size else gathered[:, :vocab_size].contiguous()
