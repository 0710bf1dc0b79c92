"""Requests under way that their callers may end by id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from quire.services.frontend.access.access import Caller
from quire.services.frontend.generation.generation import Generation


class AbortRegistry:
    """Each caller knows its own."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], list[Generation]] = {}

    @contextmanager
    def registered(self, caller: Caller | None, generation: Generation) -> Iterator[None]:
        """Within, its reader may hear Aborted."""
        known_as = _key(caller, generation.request.request_id)
        same = self._under_way.setdefault(known_as, [])
        same.append(generation)
        try:
            yield
        finally:
            same.remove(generation)
            if not same:
                del self._under_way[known_as]

    def abort(self, caller: Caller | None, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            for generation in self._under_way.get(_key(caller, request_id), ()):
                generation.abort()


def _key(caller: Caller | None, request_id: str) -> tuple[str, str]:
    return ("" if caller is None else caller.key.name, request_id)
