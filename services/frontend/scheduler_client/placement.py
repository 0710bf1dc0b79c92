"""Which of several schedulers gets new work. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from shared.pb.scheduler.v1 import scheduler_pb2 as pb


class Candidate(Protocol):
    """An open session."""

    @property
    def view(self) -> pb.ClusterView:
        """The last one it was sent."""

    @property
    def num_tokens_since_view(self) -> int:
        """Submitted after that view, so not in its counts: else a burst between two views would go to one place."""


C = TypeVar("C", bound=Candidate)


def usable(view: pb.ClusterView) -> bool:
    return view.num_workers > 0 and not view.draining


def choose(candidates: Iterable[C], num_tokens: int) -> C | None:
    """The usable one with the least waiting tokens, then the fewest running; one whose context is too short only if no
    other is there (it ends the sequence where its context does)."""
    ready = [c for c in candidates if usable(c.view)]
    return min(ready, key=lambda c: _burden(c, num_tokens), default=None)


def _burden(candidate: Candidate, num_tokens: int) -> tuple[bool, int, int]:
    view = candidate.view
    return num_tokens > view.max_model_len, view.num_waiting_tokens + candidate.num_tokens_since_view, view.num_running
