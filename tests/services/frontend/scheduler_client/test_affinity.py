"""Requests with an affinity key go to the same scheduler again, unless it has a much longer backlog."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.services.frontend.scheduler_client.placement import MAX_AFFINITY_BACKLOG_TOKENS, choose
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

HOMES = [bytes([number]) * 32 for number in range(60)]


@dataclass
class Session:
    scheduler_id: str
    view: pb.ClusterView = field(default_factory=lambda: pb.ClusterView(num_workers=1, max_model_len=100))
    num_tokens_since_view: int = 0


def homes(sessions: list[Session]) -> list[str]:
    found = [choose(sessions, 10, affinity_key=home) for home in HOMES]
    return [session.scheduler_id for session in found if session is not None]


def test_a_scheduler_that_goes_moves_its_own_work_alone() -> None:
    sessions = [Session(f"s{number}") for number in range(3)]
    before = homes(sessions)
    assert {*before} == {"s0", "s1", "s2"}
    assert homes(sessions[::-1]) == before
    sessions[0].view.draining = True
    after = homes(sessions)
    assert all(now in ("s1", "s2") if was == "s0" else now == was for was, now in zip(before, after, strict=True))


def test_work_goes_elsewhere_where_much_less_waits() -> None:
    sessions = [Session("s0"), Session("s1")]
    before = homes(sessions)
    sessions[0].num_tokens_since_view = MAX_AFFINITY_BACKLOG_TOKENS
    assert homes(sessions) == before
    sessions[0].view.num_waiting_tokens = 1
    assert {*homes(sessions)} == {"s1"}
    assert choose([], 10, affinity_key=HOMES[0]) is None
