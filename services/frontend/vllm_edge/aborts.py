"""Running requests that their callers may abort by id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from quire.services.frontend.access.access import Caller
from quire.services.frontend.generation.generation import Generation


class AbortRegistry:
    """Registry of running requests by caller and request id."""

    def __init__(self) -> None:
        self._generations: dict[tuple[str, str], list[Generation]] = {}

    @contextmanager
    def registered(self, caller: Caller | None, generation: Generation) -> Iterator[None]:
        """Registers a generation under its caller and request id within the block; an Abort call then raises Aborted
        in the code that reads it."""
        key = _key(caller, generation.request.request_id)
        same = self._generations.setdefault(key, [])
        same.append(generation)
        try:
            yield
        finally:
            same.remove(generation)
            if not same:
                del self._generations[key]

    def abort(self, caller: Caller | None, request_ids: Iterable[str]) -> None:
        """Aborts the caller's generations with these request ids; unknown ids and those of other callers are
        ignored."""
        for request_id in request_ids:
            for generation in self._generations.get(_key(caller, request_id), ()):
                generation.abort()


def _key(caller: Caller | None, request_id: str) -> tuple[str, str]:
    return ("" if caller is None else caller.key.name, request_id)
