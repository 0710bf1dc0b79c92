"""Experts move from rank to rank, and busy ones get copies, so that every rank computes as many pairs of token and
expert: expert parallel load balancing (EPLB; arXiv 2412.19437, 3.4).

Between two steps that all ranks know by their number each of them looks at the same counts, comes to the same placement
and sends and receives what that takes: nobody has to be asked.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.services.worker.layers.feed_forward.expert_placement import NO_EXPERT, PlacementMap
from quire.shared.logs import logger

if TYPE_CHECKING:  # placements are also computed where there is no torch
    from torch import Tensor

    from quire.services.worker.layers.feed_forward.experts import SparseMLP
    from quire.services.worker.layers.sharding import Shard

Load = npt.NDArray[np.int64]  # [num_experts]: tokens
log = logger("worker.ranks")
MIN_IMPROVEMENT = 0.95  # of the busiest rank's tokens as it is: what is no better is not moved for


@dataclass(frozen=True, slots=True)
class ExpertMove:
    """An expert that a rank is to have at a place, and where it is now."""

    rank: int
    place: int
    from_rank: int
    from_place: int


class LayerBalance(NamedTuple):
    """At a layer: experts that moved, on all ranks, and what the busiest rank has of the mean."""

    moved: int
    before: float
    after: float


class ExpertBalance:
    """Of the layers of this rank, all of which have been counted from the same tokens as those of the others."""

    def __init__(self, layers: Sequence[SparseMLP], counts: Tensor, shard: Shard, interval: int) -> None:
        """counts: int64 [len(layers), num_experts], which the layers add to; `interval`: steps between two looks."""
        self._layers, self._counts, self._shard, self._interval = layers, counts, shard, interval
        self._seen = np.zeros(counts.shape, dtype=np.int64)
        self.num_moved = 0  # experts, or copies, that came to this rank

    def rebalance_before(self, step_id: int) -> None:
        """A step is about to be launched, behind all before it; on CUDA this waits for those when it looks."""
        if step_id % self._interval:
            return
        counts = self._counts.clone()
        self._shard.collectives.broadcast(counts)
        counted = counts.cpu().numpy()
        looks = [self._balance(layer, load) for layer, load in zip(self._layers, counted - self._seen, strict=True)]
        self._seen = counted
        if moved := sum(look.moved for look in looks):
            before, after = (max(look[i] for look in looks) for i in (1, 2))
            log.info("experts moved", step=step_id, moved=moved, busiest_before=before, busiest_after=after)

    def _balance(self, layer: SparseMLP, load: Load) -> LayerBalance:
        assert layer.places is not None, "experts are whole"
        held = layer.places.placement
        wanted, mean = balanced_placement(load, held), max(1.0, load.sum() / len(held))
        ordered = [*placement_moves(held, wanted)]
        if ordered:
            self._move(ordered, layer.experts.packed.by_expert)
            layer.places.assign(wanted)
        return LayerBalance(len(ordered), *(round(max_rank_load(load, each) / mean, 2) for each in (held, wanted)))

    def _move(self, ordered: Sequence[ExpertMove], memory: Sequence[Tensor]) -> None:
        """memory: each [places, ...], of one layer of this rank."""
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
        for move, parts in coming:  # behind everything that reads what is overwritten
            for part, each in zip(parts, memory, strict=True):
                each[move.place].copy_(part)
        self.num_moved += len(coming)


def placement_moves(held: PlacementMap, wanted: PlacementMap) -> Iterator[ExpertMove]:
    """That make `wanted` of `held`, in the order of ranks and places. What a rank has already comes from itself."""
    for rank, place in np.argwhere(wanted != held).tolist():
        expert = wanted[rank, place]
        if expert == NO_EXPERT:
            continue
        sources = np.argwhere(held == expert).tolist()
        source = next((source for source in sources if source[0] == rank), sources[0])
        yield ExpertMove(rank, place, *source)


def balanced_placement(load: Load, held: PlacementMap) -> PlacementMap:
    """A placement under which the busiest rank has fewer tokens; `held` itself if none is found that is worth it."""
    copies = _copies(load, held.size, len(held))
    found = _keep_positions(_by_rank(load / copies, copies, held.shape), held)
    return found if max_rank_load(load, found) < MIN_IMPROVEMENT * max_rank_load(load, held) else held


def max_rank_load(load: Load, held: PlacementMap) -> float:
    """Tokens of the rank that has most, where copies of an expert share its tokens."""
    each = load / np.maximum(np.bincount(held[held != NO_EXPERT], minlength=len(load)), 1)
    return max(float(each[row[row != NO_EXPERT]].sum()) for row in held)


def _copies(load: Load, places: int, ranks: int) -> npt.NDArray[np.int64]:
    """One of each expert, and the rest for those that have most tokens a copy; no more than ranks."""
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
    """Those with copies first, then the busiest, each to the rank that has least so far, has room, and does not have
    it."""
    ranks, places = shape
    held: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0.0] * ranks
    for expert in sorted(range(len(each)), key=lambda expert: (-copies[expert], -each[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank in range(ranks) if len(held[rank]) < places and expert not in held[rank]]
            if free:  # for its first copy there is always one
                rank = min(free, key=lambda rank: (tokens[rank], rank))
                held[rank].append(expert)
                tokens[rank] += each[expert]
    return held


def _keep_positions(by_rank: list[list[int]], held: PlacementMap) -> PlacementMap:
    """What a rank has already stays where it is."""
    found = np.full(held.shape, NO_EXPERT)
    for row, before, experts in zip(found, held, by_rank, strict=True):
        stay = np.isin(before, experts)
        row[stay] = before[stay]
        new = [expert for expert in experts if expert not in before[stay]]
        row[np.flatnonzero(~stay)[: len(new)]] = new
    return found
