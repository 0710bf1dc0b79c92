"""Builds ranks that use all-reduces in small steps, as CUDA graphs do. Rank processes import this module, so it imports
nothing that only tests need."""

from __future__ import annotations

from torch import Tensor

from quire.services.worker.building.rank_processes.start import build_part
from quire.services.worker.layers.feed_forward.dispatch import ExpertDispatch
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.placement import RankPlacement
from quire.shared.settings import WorkerSettings

LEAST_ROWS = 8  # of a step that none records


def takes(x: Tensor) -> bool:
    return x.size(0) >= LEAST_ROWS


def build(settings: WorkerSettings, placement: RankPlacement) -> RankReplica:
    ExpertDispatch.is_supported = staticmethod(takes)  # type: ignore[method-assign]
    return build_part(settings, placement)
