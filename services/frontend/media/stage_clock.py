"""Wall time that the media of one request take at the frontend, by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class MediaTimes(NamedTuple):
    """Consecutive shares of a request's time, in seconds."""

    fetch_s: float  # at least one item was being fetched, or decoded from base64
    preprocess_s: float  # none was; at least one waited for a decoder process or was in one


class StageClock:
    """Divides the time of one request between the stages of its items, several of which run at the same time. `now`:
    seconds of any monotonic clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._num_fetching = self._num_processing = 0
        self._fetch_s = self._preprocess_s = 0.0
        self._counted_until = 0.0
        self._has_items = False

    @property
    def times(self) -> MediaTimes | None:
        """Time until now; None for a request without media."""
        self._count()
        return MediaTimes(self._fetch_s, self._preprocess_s) if self._has_items else None

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Counts its body as the fetching of an item."""
        self._begin()
        self._num_fetching += 1
        try:
            yield
        finally:
            self._count()
            self._num_fetching -= 1

    @contextmanager
    def processing(self) -> Iterator[None]:
        """Counts its body as the processing of an item."""
        self._begin()
        self._num_processing += 1
        try:
            yield
        finally:
            self._count()
            self._num_processing -= 1

    def _begin(self) -> None:
        self._count()
        self._has_items = True

    def _count(self) -> None:
        """Adds the time since the last call to the stage that it belongs to."""
        now = self._now()
        if self._num_fetching:
            self._fetch_s += now - self._counted_until
        elif self._num_processing:
            self._preprocess_s += now - self._counted_until
        self._counted_until = now
