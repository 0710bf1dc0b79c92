"""Which of several schedulers gets new work. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol, TypeVar

from shared.pb.scheduler.v1 import scheduler_pb2 as pb

Held = Mapping[str, int]  # by scheduler: tokens at the head of a prompt that one of its workers seems to hold

NOTHING_HELD: Held = MappingProxyType({})


class Candidate(Protocol):
    """An open session."""

    @property
    def scheduler_id(self) -> str:
        """Whose."""

    @property
    def view(self) -> pb.ClusterView:
        """The last one it was sent."""

    @property
    def num_tokens_since_view(self) -> int:
        """Submitted after that view and waiting still: else a burst between two views would go to one place."""


C = TypeVar("C", bound=Candidate)


def usable(view: pb.ClusterView) -> bool:
    return view.num_workers > 0 and not view.draining


def choose(candidates: Iterable[C], num_tokens: int, held: Held = NOTHING_HELD) -> C | None:
    """The usable one where the least is computed before this work has a token: what waits there and what it does not
    hold of the prompt. Of equals, the one with the fewest running; one whose context is too short only if no other is
    there (it ends the sequence where its context does)."""
    ready = [c for c in candidates if usable(c.view)]
    return min(ready, key=lambda c: _burden(c, num_tokens, held), default=None)


def _burden(candidate: Candidate, num_tokens: int, held: Held) -> tuple[bool, int, int]:
    view = candidate.view
    waiting = view.num_waiting_tokens + candidate.num_tokens_since_view
    # The prompt's own length is the same everywhere, so only what is saved of it counts.
    return num_tokens > view.max_model_len, waiting - held.get(candidate.scheduler_id, 0), view.num_running
