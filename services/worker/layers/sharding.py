"""How a model is cut among the ranks of a replica. Layers cut themselves; a family's file says nothing of it.

Tensor parallel as in Megatron-LM (arXiv 1909.08053): the output features of one product and the input features of the
next are cut alike, so that what is between them stays with its rank, and the results of the second are added up.
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
    """What ranks do together: all of them, in the same order, with tensors of the same shape."""

    @property
    def fuses_residual_add(self) -> bool:
        """Whether all_reduce_add() is one kernel, for a row at least."""

    @property
    def fuses_rms_norm(self) -> bool:
        """Whether all_reduce_rms_norm() is one kernel, for few rows at least."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, with the same bits on each; may be `x` itself, changed in place."""

    def all_reduce_add(self, residual: Tensor, x: Tensor, *, pdl: bool = False) -> None:
        """The same sum is added to `residual`, which all ranks have; `x` may be changed. `pdl`: in a chain of kernels
        that are launched before their inputs are there (quire.kernels.triton.pdl)."""

    def all_reduce_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """The same sum is added to `residual`, and what that becomes is normalised by rows, in one kernel; None, and
        nothing is done, where there is none for such rows."""

    def overlapped_all_reduce(self, rows: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum over all ranks of what each makes of its own `rows`, of each row by itself: [num_rows, n] ->
        [num_rows, m]. Many rows may be made in pieces, each of which is added up while the next is made."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Of the sum over all ranks this one's share: [size * n, m] -> [n, m], in the order of ranks."""

    def all_gather_columns(self, x: Tensor) -> Tensor:
        """[num_rows, n] of every rank -> [num_rows, size * n], in the order of ranks."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape], in the order of ranks."""

    def min_over_ranks(self, value: int) -> int:
        """Of all ranks' values."""

    def broadcast(self, x: Tensor) -> None:
        """Rank 0's values take the place of the others'."""

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        """Tensors to ranks and memory for those from ranks; any two of them name what they exchange in one order. What
        was received is there for whatever comes next on the device."""

    def all_to_all(self, rows: Tensor, sent: list[int], into: Tensor, received: list[int]) -> None:
        """All-to-all: so many of the rows go to each rank, in the order of ranks, and so many come from each, in that
        order; what this rank has for itself is among both."""


class _SingleRank:
    """Of a rank that has the whole model."""

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
        """They are."""

    def exchange(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        """There is no other rank."""

    def all_to_all(self, rows: Tensor, sent: list[int], into: Tensor, received: list[int]) -> None:
        into.copy_(rows)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of a rank."""

    queries: range
    # By key of this rank, the whole model's: ranks that read the same one have a copy each.
    keys: tuple[int, ...]
    owned: tuple[bool, ...]  # by key of this rank: whether no rank before it, and no key before it, is the same

    @property
    def num_q(self) -> int:
        return len(self.queries)

    @property
    def num_kv(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a model."""

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=_SingleRank)
    whole_experts: bool = False  # each expert has one rank; otherwise all ranks have a part of each
    spare_experts: int = 0  # places of each rank for copies of others' experts, by load
    dispatches: bool = False  # rows go to the ranks of their experts; otherwise every rank has every row

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def expert_ranks(self) -> int:
        """That have experts of their own."""
        return self.size if self.whole_experts else 1

    def part(self, total: int, what: str) -> range:
        """Of `total` features that are cut evenly. Raises InvalidArgument where they cannot be."""
        if total % self.size:
            raise InvalidArgument(f"{FIELD}: {self.size} ranks do not divide {what}, {total}", field=FIELD)
        count = total // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def experts(self, count: int, size: int) -> tuple[range, range]:
        """Of `count` experts those that this rank has, and which of their `size` intermediate features."""
        if self.whole_experts:
            return self.part(count, "the experts"), range(size)
        return range(count), self.part(size, "the experts' intermediate_size")

    def room(self, total: int) -> int:
        """For rows of a table of `total`, as many on every rank."""
        return -(-total // self.size)

    def rows(self, total: int) -> range:
        """Of a table that need not divide evenly: the last ranks may have fewer than they have room for."""
        count = self.room(total)
        return range(min(self.rank * count, total), min((self.rank + 1) * count, total))

    def heads(self, num_q_heads: int, num_kv_heads: int, what: str = "num_attention_heads") -> HeadShare:
        """Queries are cut evenly; each rank has the keys that its queries read, several times where queries of one key
        are as many as no other's on this rank. `what`: the name that the configuration has for the queries."""
        queries = self.part(num_q_heads, what)
        group = num_q_heads // num_kv_heads
        shared = math.gcd(group, len(queries))  # queries of this rank that read one key
        keys = [first // group for first in range(0, num_q_heads, shared)]
        per_rank = len(queries) // shared
        first = self.rank * per_rank
        owned = (key not in keys[:place] for place, key in enumerate(keys))
        return HeadShare(queries, tuple(keys[first : first + per_rank]), tuple(owned)[first : first + per_rank])


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Memory for a part of a checkpoint's tensor."""

    tensor: Tensor
    dim: int
    taken: tuple[range, ...]  # indices along `dim`, one after the other in `tensor`
    size: int  # of the whole tensor along `dim`

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return (*self.tensor.shape[: self.dim], self.size, *self.tensor.shape[self.dim + 1 :])


def portion(tensor: Tensor, dim: int, taken: tuple[range, ...], size: int) -> Tensor | TensorPart:
    """The tensor itself where all of it is taken, in its order."""
    runs = _joined(taken)
    return tensor if runs == (range(size),) else TensorPart(tensor, dim, runs, size)


def _joined(parts: Iterable[range]) -> tuple[range, ...]:
    runs: list[range] = []
    for part in parts:
        joins = runs and runs[-1].stop == part.start
        runs.append(range(runs.pop().start, part.stop) if joins else part)
    return tuple(runs)


def shifted(part: range, offset: int) -> range:
    return range(part.start + offset, part.stop + offset)


def head_features(heads: tuple[int, ...] | range, head_dim: int, offset: int = 0) -> tuple[range, ...]:
    """The features of `heads`, in this order; `offset`: of head 0."""
    starts = (offset + head * head_dim for head in heads)
    return _joined(range(start, start + head_dim) for start in starts)
