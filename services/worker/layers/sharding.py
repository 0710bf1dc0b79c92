"""Sharding of a model over tensor-parallel ranks. Layers shard themselves; a family's file does not deal with it.

As in Megatron-LM (arXiv 1909.08053): the output features of one product and the input features of the next are sharded
alike, so intermediate results stay on their rank and the results of the second are all-reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

FIELD = "tensor_parallel_size"


class Collectives(Protocol):
    """Collectives of tensor-parallel ranks, called by all of them in the same order with tensors of equal shapes."""

    @property
    def fuses_residual_add(self) -> bool:
        """Whether all_reduce_add() is one kernel, at least for a single row."""

    @property
    def fuses_rms_norm(self) -> bool:
        """Whether all_reduce_rms_norm() is one kernel, at least for few rows."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over all ranks, with the same bits on each; may change and return `x`."""

    def all_reduce_add(self, residual: Tensor, x: Tensor, *, pdl: bool = False) -> None:
        """Adds the sum over all ranks to `residual`, which is equal on all ranks; may change `x`.

        `pdl`: part of a chain of kernels launched before their inputs are ready (quire.kernels.triton.pdl).
        """

    def all_reduce_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Adds the sum over all ranks to `residual` in place and returns its RMS norm, in one kernel.

        Returns None, without effect, if the sizes are unsupported.
        """

    def overlapped_all_reduce(self, rows: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the sum over all ranks of make(rows): [num_rows, n] -> [num_rows, m].

        `make` treats rows independently. Many rows are processed in pieces, each reduced while the next is computed.
        """

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Returns this rank's part of the sum over all ranks: [size * n, m] -> [n, m], in rank order."""

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """Concatenates all ranks' columns: [num_rows, n] -> [num_rows, size * n], in rank order."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers x of all ranks: [size, *x.shape], in rank order."""

    def min_over_ranks(self, value: int) -> int:
        """Returns the minimum of all ranks' values."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrites `x` with rank 0's values."""

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        """Sends each tensor to its rank and receives others, as (tensor, rank) pairs.

        Any two ranks name their exchanges in the same order. Received tensors are ready for subsequent work on the
        device.
        """

    def all_to_all(self, rows: Tensor, sent: list[int], into: Tensor, received: list[int]) -> None:
        """Sends `sent` rows to each rank and receives `received` rows from each, in rank order, including this rank."""


class _SingleRank:
    """Collectives of a rank that has the whole model: sums and gathers return their input."""

    fuses_residual_add = True
    fuses_rms_norm = False

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_add(self, residual: Tensor, x: Tensor, *, pdl: bool = False) -> None:
        residual += x

    def all_reduce_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        return None

    def overlapped_all_reduce(self, rows: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        return make(rows)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def min_over_ranks(self, value: int) -> int:
        return value

    def broadcast(self, x: Tensor) -> None:
        """Does nothing: values are rank 0's."""

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        """Does nothing: there is no other rank."""

    def all_to_all(self, rows: Tensor, sent: list[int], into: Tensor, received: list[int]) -> None:
        into.copy_(rows)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Attention heads of a rank: consecutive query heads, and the key heads that they use."""

    queries: range
    # Index in the whole model of each key head of this rank; ranks that use the same one have copies.
    keys: tuple[int, ...]
    owned: tuple[bool, ...]  # whether each key head is the first copy over all ranks

    @property
    def num_q(self) -> int:
        return len(self.queries)

    @property
    def num_kv(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor-parallel part of a model: rank, size, collectives, and how experts are distributed."""

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=_SingleRank)
    whole_experts: bool = False  # expert parallel: each expert is on one rank, else sharded over all
    spare_experts: int = 0  # places per rank for replicas of other ranks' experts
    dispatches: bool = False  # rows are sent to their experts' ranks, else every rank has all rows

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def expert_ranks(self) -> int:
        """Number of ranks with disjoint sets of experts; 1 if every rank has a part of all."""
        return self.size if self.whole_experts else 1

    def part(self, total: int, what: str) -> range:
        """Returns this rank's half-open part of `total` features.

        `what`: name of the features in errors. Raises InvalidArgument if the ranks do not divide them evenly.
        """
        if total % self.size:
            raise InvalidArgument(f"{FIELD}: {self.size} ranks do not divide {what}, {total}", field=FIELD)
        count = total // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def experts(self, count: int, size: int) -> tuple[range, range]:
        """Returns this rank's experts and its part of their `size` intermediate features.

        Whole experts with expert parallelism, else a part of each. Raises InvalidArgument if the ranks do not divide
        them evenly.
        """
        if self.whole_experts:
            return self.part(count, "the experts"), range(size)
        return range(count), self.part(size, "the experts' intermediate_size")

    def room(self, total: int) -> int:
        """Returns the rows allocated on every rank for a table of `total` rows, its part rounded up."""
        return -(-total // self.size)

    def rows(self, total: int) -> range:
        """Returns this rank's half-open range of rows of a table that need not divide evenly; the last ranks may have
        fewer or none."""
        count = self.room(total)
        return range(min(self.rank * count, total), min((self.rank + 1) * count, total))

    def heads(self, num_q_heads: int, num_kv_heads: int, what: str = "num_attention_heads") -> HeadShare:
        """Divides the query heads evenly; each rank gets the key heads its queries use.

        Key heads are repeated if this rank's queries per key differ. `what`: name of the query heads in the
        configuration. Raises InvalidArgument if the ranks do not divide the query heads.
        """
        queries = self.part(num_q_heads, what)
        group = num_q_heads // num_kv_heads
        shared = math.gcd(group, len(queries))  # queries per key copy
        keys = [first // group for first in range(0, num_q_heads, shared)]
        per_rank = len(queries) // shared
        first = self.rank * per_rank
        owned = (key not in keys[:place] for place, key in enumerate(keys))
        return HeadShare(queries, tuple(keys[first : first + per_rank]), tuple(owned)[first : first + per_rank])


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Memory for a part of a checkpoint tensor: ranges along one dimension, concatenated."""

    tensor: Tensor
    dim: int
    taken: tuple[range, ...]  # indices along `dim`, concatenated in `tensor`
    size: int  # size of the whole tensor along `dim`

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor in the checkpoint, not of this rank's memory."""
        return (*self.tensor.shape[: self.dim], self.size, *self.tensor.shape[self.dim + 1 :])


def portion(tensor: Tensor, dim: int, taken: tuple[range, ...], size: int) -> Tensor | TensorPart:
    """Returns the destination of the ranges `taken` along `dim` of a checkpoint tensor that has `size` there.

    Returns the tensor itself if all of it is taken in order.
    """
    runs = _joined(taken)
    return tensor if runs == (range(size),) else TensorPart(tensor, dim, runs, size)


def _joined(parts: Iterable[range]) -> tuple[range, ...]:
    """Merges consecutive ranges that touch; keeps their order."""
    runs: list[range] = []
    for part in parts:
        joins = runs and runs[-1].stop == part.start
        runs.append(range(runs.pop().start, part.stop) if joins else part)
    return tuple(runs)


def shifted(part: range, offset: int) -> range:
    return range(part.start + offset, part.stop + offset)


def head_features(heads: tuple[int, ...] | range, head_dim: int, offset: int = 0) -> tuple[range, ...]:
    """Returns the feature ranges of `heads`, in this order, touching ones merged; `offset`: first feature of head 0."""
    starts = (offset + head * head_dim for head in heads)
    return _joined(range(start, start + head_dim) for start in starts)
