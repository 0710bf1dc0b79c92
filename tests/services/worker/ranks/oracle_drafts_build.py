"""Builds ranks whose drafts are mostly right. Rank processes import this module."""

from __future__ import annotations

from quire.services.worker.building.rank_processes import start
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.replica.replica import Replica
from quire.shared.settings import WorkerSettings
from tests.kv_groups.test_recurrent_drafts import Knowing
from tests.services.worker.replica_internals import propose


def know(replica: Replica, texts: list[list[int]]) -> None:
    """Makes the replica draft these texts."""
    propose(replica, Knowing(texts, replica.limits.block_size))


def build(texts: list[list[int]], settings: WorkerSettings, placement: RankPlacement) -> RankReplica:
    part = start.build_part(settings, placement)
    know(part.replica, texts)
    return part
