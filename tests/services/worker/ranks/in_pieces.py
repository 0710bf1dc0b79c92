"""What a rank builds whose sums overlap in pieces of few rows, on the CPU as well: its process imports this, and
nothing that only tests need."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, distributed

from quire.services.worker.building.rank_processes.start import build_part
from quire.services.worker.ranks.collectives import together
from quire.services.worker.ranks.collectives.copied_sums import CopiedSums, RowPieces
from quire.services.worker.ranks.collectives.peer_memory import RankStore, open_copied_sums
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.seat import Seat
from quire.shared.settings import WorkerSettings

FEW = RowPieces(least_rows=4, most=3)
added: list[int] = []  # rows of each piece of this process


class GlooSums:
    """What is made in pieces is added up behind each: the products are those of ranks whose GPUs copy meanwhile."""

    def __init__(self, _store: RankStore, _rank: int, _size: int, _device: torch.device) -> None:
        pass

    def was_greeted(self) -> bool:
        return True

    def cuts(self, num_rows: int) -> list[range]:
        return FEW.of(num_rows)

    def add_up_made(self, rows: Tensor, cuts: list[range], make: Callable[[Tensor], Tensor]) -> Tensor:
        parts = []
        for cut in cuts:
            parts.append(make(rows[cut.start : cut.stop]).contiguous())
            distributed.all_reduce(parts[-1])
            added.append(len(cut))
        return torch.cat(parts)


class Counted:
    def __init__(self, sums: CopiedSums) -> None:
        self._sums = sums
        self.was_greeted, self.cuts = sums.was_greeted, sums.cuts

    def add_up_made(self, rows: Tensor, cuts: list[range], make: Callable[[Tensor], Tensor]) -> Tensor:
        added.extend(map(len, cuts))
        return self._sums.add_up_made(rows, cuts, make)


def opened(store: RankStore, rank: int, size: int, device: torch.device) -> Counted | None:
    sums = open_copied_sums(store, rank, size, device)
    if sums is None:
        return None
    sums.pieces = FEW
    return Counted(sums)


BESIDE = {"cpu": GlooSums, "cuda": opened}


def build(settings: WorkerSettings, seat: Seat) -> RankReplica:
    together.BESIDE = BESIDE
    return build_part(settings, seat)
