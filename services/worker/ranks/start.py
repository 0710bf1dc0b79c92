"""The ranks of a worker, as its settings want them."""

from __future__ import annotations

import functools

from services.worker.build import build_replica, open_grammars
from services.worker.ranks.follower import RankReplica
from services.worker.ranks.grammars import FollowedGrammars
from services.worker.ranks.local import LocalRanks
from services.worker.ranks.seat import Seat
from services.worker.structured.compile_pool import CompilePool
from shared import logs
from shared.settings import WorkerSettings


def start_ranks(settings: WorkerSettings) -> LocalRanks | None:
    """None for a replica of one."""
    if settings.num_ranks == 1:
        return None
    return LocalRanks(
        settings.num_ranks, functools.partial(build_part, settings), stages=settings.pipeline_parallel_size
    )


def build_part(settings: WorkerSettings, seat: Seat) -> RankReplica:
    """In the process of the rank."""
    logs.configure(f"{settings.name} rank {seat.rank}", settings.log_level, settings.log_format)
    pool = CompilePool(lambda: open_grammars(settings))
    pool.look_ahead()
    replica = build_replica(settings, pool, seat=seat)
    return RankReplica(
        replica,
        FollowedGrammars(pool),
        synchronous=settings.device == "cpu",
        in_first_stage=seat.rank < seat.width,
    )
