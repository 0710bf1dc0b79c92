"""What a rank builds whose sums overlap on any device, in pieces of few rows: its process imports this, and nothing
that only tests need."""

from __future__ import annotations

from services.worker.ranks import together
from services.worker.ranks.follower import RankReplica
from services.worker.ranks.seat import Seat
from services.worker.ranks.start import build_part
from services.worker.ranks.together import Pieces
from shared.settings import WorkerSettings

OVERLAP = dict.fromkeys(("cpu", "cuda"), Pieces(least_rows=4, most=3))


def build(settings: WorkerSettings, seat: Seat) -> RankReplica:
    together.OVERLAP = OVERLAP
    return build_part(settings, seat)
