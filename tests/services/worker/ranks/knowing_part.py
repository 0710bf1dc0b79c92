"""A rank whose drafts are mostly right: its process imports this."""

from __future__ import annotations

from quire.services.worker.building.rank_processes import start
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.seat import Seat
from quire.services.worker.replica.replica import Replica
from quire.shared.settings import WorkerSettings
from tests.kv_groups.test_drafts_of_states import Knowing
from tests.services.worker.parts import propose


def know(replica: Replica, texts: list[list[int]]) -> None:
    """It has drafts for these."""
    propose(replica, Knowing(texts, replica.limits.block_size))


def build(texts: list[list[int]], settings: WorkerSettings, seat: Seat) -> RankReplica:
    part = start.build_part(settings, seat)
    know(part.replica, texts)
    return part
