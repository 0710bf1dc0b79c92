"""Builds a rank with the whole model. Rank processes import this module, so it imports nothing that only tests need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.services.worker.building.build import build_replica
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.grammars import FollowerGrammars
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.structured.compile_pool import CompilePool
from tests.services.worker.rig import Rig


def build(folder: Path, _seat: RankPlacement) -> RankReplica:
    """Builds a rank with the whole model: nothing is sharded."""
    return RankReplica(build_replica(Rig.settings(folder)), FollowerGrammars(CompilePool(_no_library)))


def _no_library() -> Any:
    raise AssertionError("no request has a form here")
