"""What a rank builds where sums are normalised as they are added up, on the CPU as well: its process imports this, and
nothing that only tests need."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from quire.services.worker.building.rank_processes.start import build_part
from quire.services.worker.ranks.collectives.together import Together
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.seat import Seat
from quire.shared.settings import WorkerSettings
from tests.services.worker.parts import whole_model_of

KEPT = (0, 1, 1)  # layers whose input build_keeping() keeps
MOST_ROWS = 16  # of which that is done; others are added up first
normed: list[int] = []  # rows of each such sum of this process


def add_up_normed(ranks: Together, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    if x.size(0) > MOST_ROWS:
        return None
    normed.append(x.size(0))
    total = x.contiguous().clone()
    distributed.all_reduce(total, group=ranks._group)
    residual += total
    return torch.nn.functional.rms_norm(residual, (x.size(1),), weight, eps)


def patch() -> None:
    Together.norms_sums = True  # type: ignore[assignment, method-assign]
    Together.add_up_normed = add_up_normed  # type: ignore[method-assign]


def build(settings: WorkerSettings, seat: Seat) -> RankReplica:
    patch()
    return build_part(settings, seat)


def build_keeping(settings: WorkerSettings, seat: Seat) -> RankReplica:
    part = build(settings, seat)
    whole_model_of(part.replica).keep_states(KEPT)
    return part
