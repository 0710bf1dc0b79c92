"""Builds ranks with fused all-reduce and RMSNorm, on the CPU as well. Rank processes import this module, so it imports
nothing that only tests need."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from quire.services.worker.building.rank_processes.start import build_part
from quire.services.worker.ranks.collectives.group_collectives import GroupCollectives
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.placement import RankPlacement
from quire.shared.settings import WorkerSettings
from tests.services.worker.replica_internals import whole_model_of

KEPT = (0, 1, 1)  # layers whose input build_keeping() keeps
MOST_ROWS = 16  # of which that is done; others are added up first
normed: list[int] = []  # rows of each such sum of this process


def all_reduce_rms_norm(
    ranks: GroupCollectives, residual: Tensor, x: Tensor, weight: Tensor, eps: float
) -> Tensor | None:
    if x.size(0) > MOST_ROWS:
        return None
    normed.append(x.size(0))
    total = x.contiguous().clone()
    distributed.all_reduce(total, group=ranks._group)
    residual += total
    return torch.nn.functional.rms_norm(residual, (x.size(1),), weight, eps)


def patch() -> None:
    GroupCollectives.fuses_rms_norm = True  # type: ignore[assignment, method-assign]
    GroupCollectives.all_reduce_rms_norm = all_reduce_rms_norm  # type: ignore[method-assign]


def build(settings: WorkerSettings, placement: RankPlacement) -> RankReplica:
    patch()
    return build_part(settings, placement)


def build_keeping(settings: WorkerSettings, placement: RankPlacement) -> RankReplica:
    part = build(settings, placement)
    whole_model_of(part.replica).keep_states(KEPT)
    return part
