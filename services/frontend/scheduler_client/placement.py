"""Chooses the scheduler for new sequences; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Protocol, TypeVar

from quire.shared import rendezvous
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

CachedTokens = Mapping[str, int]  # scheduler id -> leading prompt tokens that one of its workers has cached

NO_CACHED_TOKENS: CachedTokens = MappingProxyType({})
MAX_AFFINITY_BACKLOG_TOKENS = 32_768  # extra backlog tolerated at the preferred scheduler


class Candidate(Protocol):
    """An open session that may be chosen for new sequences."""

    @property
    def scheduler_id(self) -> str:
        """Id of the session's scheduler."""

    @property
    def view(self) -> pb.ClusterView:
        """The last ClusterView received from its scheduler."""

    @property
    def num_tokens_since_view(self) -> int:
        """Prompt tokens submitted after that view and still waiting; without them a burst between two views would go to
        one scheduler."""


C = TypeVar("C", bound=Candidate)


def is_usable(view: pb.ClusterView) -> bool:
    return view.num_workers > 0 and not view.draining


def choose(
    candidates: Iterable[C], num_tokens: int, cached: CachedTokens = NO_CACHED_TOKENS, affinity_key: bytes = b""
) -> C | None:
    """Returns the usable candidate with the least computation before the first token: its backlog minus the cached
    prompt tokens. Ties go to the one with the fewest running sequences; candidates with too short a context come last
    (they stop the sequence at their limit). With an `affinity_key` the same candidate is chosen again unless its
    backlog is much longer."""
    ready = [c for c in candidates if is_usable(c.view)]
    if affinity_key and ready:
        shortest = min(map(_backlog, ready))
        eligible = (c for c in ready if _backlog(c) - shortest <= MAX_AFFINITY_BACKLOG_TOKENS)
        return max(eligible, key=lambda c: rendezvous.weight(affinity_key, c.scheduler_id))
    return min(ready, key=lambda c: _load_key(c, num_tokens, cached), default=None)


def _load_key(candidate: Candidate, num_tokens: int, cached: CachedTokens) -> tuple[bool, int, int]:
    """Returns the order of choice, smallest first: too short a context, backlog minus cached prompt tokens, running
    sequences."""
    view = candidate.view
    backlog = _backlog(candidate)
    # The prompt's length is the same for all candidates, so only its cached part makes a difference.
    return num_tokens > view.max_model_len, backlog - cached.get(candidate.scheduler_id, 0), view.num_running


def _backlog(candidate: Candidate) -> int:
    return candidate.view.num_waiting_tokens + candidate.num_tokens_since_view
