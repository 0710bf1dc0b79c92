"""Builds ranks whose all-reduces overlap in pieces of few rows, on the CPU as well. Rank processes import this module,
so it imports nothing that only tests need."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, distributed

from quire.services.worker.building.rank_processes.start import build_part
from quire.services.worker.ranks.collectives import group_collectives
from quire.services.worker.ranks.collectives.copy_engine_sums import CopyEngineSums, RowPieces
from quire.services.worker.ranks.collectives.peer_memory import RankStore, open_copy_engine_sums
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.placement import RankPlacement
from quire.shared.settings import WorkerSettings

FEW = RowPieces(min_rows=4, max_pieces=3)
added: list[int] = []  # rows of each piece of this process


class GlooSums:
    """Sums each piece after computing it; the products are those of ranks whose GPUs copy meanwhile."""

    def __init__(self, _store: RankStore, _rank: int, _size: int, _device: torch.device) -> None:
        pass

    def is_peer_ready(self) -> bool:
        return True

    def cuts(self, num_rows: int) -> list[range]:
        return FEW.split(num_rows)

    def overlapped_all_reduce(self, rows: Tensor, cuts: list[range], make: Callable[[Tensor], Tensor]) -> Tensor:
        parts = []
        for cut in cuts:
            parts.append(make(rows[cut.start : cut.stop]).contiguous())
            distributed.all_reduce(parts[-1])
            added.append(len(cut))
        return torch.cat(parts)


class Counted:
    def __init__(self, sums: CopyEngineSums) -> None:
        self._sums = sums
        self.is_peer_ready, self.cuts = sums.is_peer_ready, sums.cuts

    def overlapped_all_reduce(self, rows: Tensor, cuts: list[range], make: Callable[[Tensor], Tensor]) -> Tensor:
        added.extend(map(len, cuts))
        return self._sums.overlapped_all_reduce(rows, cuts, make)


def opened(store: RankStore, rank: int, size: int, device: torch.device) -> Counted | None:
    sums = open_copy_engine_sums(store, rank, size, device)
    if sums is None:
        return None
    sums.pieces = FEW
    return Counted(sums)


OVERLAPPED_SUMS = {"cpu": GlooSums, "cuda": opened}


def build(settings: WorkerSettings, placement: RankPlacement) -> RankReplica:
    group_collectives.OVERLAPPED_SUMS.update(OVERLAPPED_SUMS)
    return build_part(settings, placement)
