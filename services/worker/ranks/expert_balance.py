"""Expert parallel load balancing (EPLB; arXiv 2412.19437, section 3.4): moves and replicates experts so that all ranks
compute about the same number of (token, expert) pairs.

Before steps with agreed numbers every rank sees the same counts, derives the same placement and exchanges the experts
that it takes; no coordination is needed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.services.worker.layers.feed_forward.expert_placement import NO_EXPERT, PlacementMap
from quire.shared.logs import logger

if TYPE_CHECKING:  # placements are also computed without torch
    from torch import Tensor

    from quire.services.worker.layers.feed_forward.experts import SparseMLP
    from quire.services.worker.layers.sharding import Shard

Load = npt.NDArray[np.int64]  # [num_experts]: tokens
log = logger("worker.ranks")
MIN_IMPROVEMENT = 0.95  # a new placement must reduce the busiest rank's tokens to this share


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """Copy of an expert from its current place to its place on `rank`."""

    rank: int
    place: int
    from_rank: int
    from_place: int


class LayerBalance(NamedTuple):
    """Outcome for a layer: experts moved on all ranks, and the busiest rank's load relative to the mean."""

    moved: int
    before: float
    after: float


class ExpertBalance:
    """Balances the layers of this rank; all ranks have counted the same tokens."""

    def __init__(self, layers: Sequence[SparseMLP], counts: Tensor, shard: Shard, interval: int) -> None:
        """`counts`: int64 [len(layers), num_experts], incremented by the layers; `interval`: steps between two
        rebalances."""
        self._layers, self._counts, self._shard, self._interval = layers, counts, shard, interval
        self._seen = np.zeros(counts.shape, dtype=np.int64)
        self.num_moved = 0  # experts or replicas received by this rank

    def rebalance_before(self, step_id: int) -> None:
        """Rebalances all layers before every `interval`-th step, by rank 0's counts since the last time; on CUDA it
        then waits for the previous steps. Does nothing before other steps."""
        if step_id % self._interval:
            return
        counts = self._counts.clone()
        self._shard.collectives.broadcast(counts)
        counted = counts.cpu().numpy()
        looks = [self._balance(layer, load) for layer, load in zip(self._layers, counted - self._seen, strict=True)]
        self._seen = counted
        if moved := sum(look.moved for look in looks):
            before, after = (max(look[i] for look in looks) for i in (1, 2))
            log.info(
                "experts moved between ranks", step=step_id, moved=moved, busiest_before=before, busiest_after=after
            )

    def _balance(self, layer: SparseMLP, load: Load) -> LayerBalance:
        """Moves one layer's experts to a better placement for the tokens `load` since the last rebalance, if it is
        worth it."""
        assert layer.places is not None, "experts are not sharded"
        held = layer.places.placement
        wanted, mean = balanced_placement(load, held), max(1.0, load.sum() / len(held))
        ordered = [*placement_moves(held, wanted)]
        if ordered:
            self._move(ordered, layer.experts.packed.by_expert)
            layer.places.assign(wanted)
        return LayerBalance(len(ordered), *(round(max_rank_load(load, each) / mean, 2) for each in (held, wanted)))

    def _move(self, ordered: Sequence[ExpertMove], memory: Sequence[Tensor]) -> None:
        """Executes moves for one layer: exchanges weights with other ranks, then overwrites places. `memory`: tensors
        of this rank, each [places, ...]."""
        rank = self._shard.rank
        coming = [(move, [each[move.place].clone() for each in memory]) for move in ordered if move.rank == rank]
        going = [move for move in ordered if move.from_rank == rank and move.rank != rank]
        self._shard.collectives.exchange(
            [(each[move.from_place], move.rank) for move in going for each in memory],
            [(part, move.from_rank) for move, parts in coming if move.from_rank != rank for part in parts],
        )
        for move, parts in coming:
            if move.from_rank == rank:
                for part, each in zip(parts, memory, strict=True):
                    part.copy_(each[move.from_place])
        for move, parts in coming:  # after all reads of the memory that is overwritten
            for part, each in zip(parts, memory, strict=True):
                each[move.place].copy_(part)
        self.num_moved += len(coming)


def placement_moves(held: PlacementMap, wanted: PlacementMap) -> Iterator[ExpertMove]:
    """Yields the moves from the current placement to `wanted`, by rank and place; a rank's own copy is the preferred
    source."""
    for rank, place in np.argwhere(wanted != held).tolist():
        expert = wanted[rank, place]
        if expert == NO_EXPERT:
            continue
        sources = np.argwhere(held == expert).tolist()
        source = next((source for source in sources if source[0] == rank), sources[0])
        yield ExpertMove(rank, place, *source)


def balanced_placement(load: Load, held: PlacementMap) -> PlacementMap:
    """Returns a placement [ranks, places] with a lower maximum load, or the current one if none is worth the moves
    (MIN_IMPROVEMENT)."""
    copies = _copies(load, held.size, len(held))
    found = _keep_positions(_by_rank(load / copies, copies, held.shape), held)
    return found if max_rank_load(load, found) < MIN_IMPROVEMENT * max_rank_load(load, held) else held


def max_rank_load(load: Load, held: PlacementMap) -> float:
    """Returns the tokens of the busiest rank; replicas of an expert share its tokens equally."""
    each = load / np.maximum(np.bincount(held[held != NO_EXPERT], minlength=len(load)), 1)
    return max(float(each[row[row != NO_EXPERT]].sum()) for row in held)


def _copies(load: Load, places: int, ranks: int) -> npt.NDArray[np.int64]:
    """Returns the number of replicas of each expert: one each, then more for those with most tokens per replica; at
    most one per rank."""
    copies = np.ones(len(load), dtype=np.int64)
    busy = [(-tokens, expert) for expert, tokens in enumerate(load.tolist()) if tokens and ranks > 1]
    heapq.heapify(busy)
    for _ in range(places - len(load)):
        if not busy:
            break
        _, expert = heapq.heappop(busy)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(busy, (-load[expert] / copies[expert], expert))
    return copies


def _by_rank(each: npt.NDArray[np.float64], copies: npt.NDArray[np.int64], shape: tuple[int, ...]) -> list[list[int]]:
    """Returns the experts of each rank: replicated experts are assigned first, then by load, each to the least loaded
    rank that has room and does not have it. `each`: tokens per replica."""
    ranks, places = shape
    held: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0.0] * ranks
    for expert in sorted(range(len(each)), key=lambda expert: (-copies[expert], -each[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank in range(ranks) if len(held[rank]) < places and expert not in held[rank]]
            if free:  # always non-empty for the first replica
                rank = min(free, key=lambda rank: (tokens[rank], rank))
                held[rank].append(expert)
                tokens[rank] += each[expert]
    return held


def _keep_positions(by_rank: list[list[int]], held: PlacementMap) -> PlacementMap:
    """Converts to a placement in which experts that a rank keeps do not change their place."""
    found = np.full(held.shape, NO_EXPERT)
    for row, before, experts in zip(found, held, by_rank, strict=True):
        stay = np.isin(before, experts)
        row[stay] = before[stay]
        new = [expert for expert in experts if expert not in before[stay]]
        row[np.flatnonzero(~stay)[: len(new)]] = new
    return found
