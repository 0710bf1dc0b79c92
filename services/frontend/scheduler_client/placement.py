"""Which of several schedulers gets new work. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol, TypeVar

from quire.shared import rendezvous
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

CachedTokens = Mapping[str, int]  # by scheduler: tokens at the head of a prompt that one of its workers seems to hold

NO_CACHED_TOKENS: CachedTokens = MappingProxyType({})
MAX_AFFINITY_BACKLOG_TOKENS = (
    32_768  # that may wait at the scheduler where work is at home before it goes to another one
)


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


def is_usable(view: pb.ClusterView) -> bool:
    return view.num_workers > 0 and not view.draining


def choose(
    candidates: Iterable[C], num_tokens: int, cached: CachedTokens = NO_CACHED_TOKENS, affinity_key: bytes = b""
) -> C | None:
    """The usable one where the least is computed before this work has a token: what waits there and what it does not
    hold of the prompt. Of equals, the one with the fewest running; one whose context is too short only if no other is
    there (it ends the sequence where its context does). Work with a `home` goes to the same one again and again, as
    long as there is not much less to do elsewhere."""
    ready = [c for c in candidates if is_usable(c.view)]
    if affinity_key and ready:
        least = min(map(_waiting, ready))
        near = (c for c in ready if _waiting(c) - least <= MAX_AFFINITY_BACKLOG_TOKENS)
        return max(near, key=lambda c: rendezvous.weight(affinity_key, c.scheduler_id))
    return min(ready, key=lambda c: _burden(c, num_tokens, cached), default=None)


def _burden(candidate: Candidate, num_tokens: int, cached: CachedTokens) -> tuple[bool, int, int]:
    view = candidate.view
    waiting = _waiting(candidate)
    # The prompt's own length is the same everywhere, so only what is saved of it counts.
    return num_tokens > view.max_model_len, waiting - cached.get(candidate.scheduler_id, 0), view.num_running


def _waiting(candidate: Candidate) -> int:
    return candidate.view.num_waiting_tokens + candidate.num_tokens_since_view
