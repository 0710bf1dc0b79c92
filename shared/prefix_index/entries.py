"""Entries of the registry and the index in Redis. They are validated, because every client with the password can
write them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.shared.kv.kv_retention import Retention, retention_of
from quire.shared.kv.kv_specs import FULL, Window
from quire.shared.logs import logger

log = logger("prefix_index")

MAX_NAME_BYTES = 256
MAX_VALUE_BYTES = 16 * 1024
MAX_GROUPS = 64
MAX_NUMBER = 2**63 - 1
LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class SchedulerEntry:
    """A scheduler with a valid lease."""

    id: str
    address: str
    epoch: int
    num_workers: int
    draining: bool = False  # accepts no workers or frontends


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A worker whose scheduler has a valid lease; block ids are valid only in this epoch."""

    id: str
    epoch: int
    scheduler: str
    groups: tuple[Retention, ...] = ()  # KV groups; empty: one with full attention


class MalformedEntries:
    """Counts malformed entries and logs at most one of them a minute."""

    def __init__(self, count: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`count` is called with the kind of each entry: scheduler or worker."""
        self._count = count
        self._clock = clock
        self._logged_at = -LOG_INTERVAL_S
        self._num_suppressed = 0

    def add(self, kind: str, name: bytes, reason: str) -> None:
        """Counts a malformed entry of this kind and logs it, unless one was logged within LOG_INTERVAL_S."""
        self._count(kind)
        now = self._clock()
        if now - self._logged_at < LOG_INTERVAL_S:
            self._num_suppressed += 1
            return
        shown = name[:MAX_NAME_BYTES].decode(errors="backslashreplace")
        log.warning(
            "skipped an unreadable entry in Redis",
            kind=kind,
            id=shown,
            reason=reason,
            suppressed_since_last_line=self._num_suppressed,
        )
        self._logged_at, self._num_suppressed = now, 0


LOG_ONLY = MalformedEntries(lambda _kind: None)


def scheduler_entry(name: str, value: bytes) -> SchedulerEntry:
    """Parses the JSON value of a scheduler's key; `name`: its id. Raises ValueError for malformed or oversized
    values."""
    entry = _fields(value)
    numbers = _number(entry, "epoch"), _number(entry, "num_workers")
    return SchedulerEntry(name, _text(entry, "address"), *numbers, bool(entry.get("draining")))


def worker_entry(name: str, value: bytes) -> WorkerEntry:
    """Parses the value of a worker's key. Raises ValueError."""
    entry = _fields(value)
    return WorkerEntry(name, _number(entry, "epoch"), _text(entry, "scheduler"), _groups(entry))


def name_of(data: bytes) -> str:
    """Decodes an id from Redis and checks its length. Raises ValueError, also for bytes that are not UTF-8."""
    if not 0 < len(data) <= MAX_NAME_BYTES:
        raise ValueError(f"an id has 1 to {MAX_NAME_BYTES} bytes, not {len(data)}")
    return data.decode()


def _fields(value: bytes) -> dict[str, Any]:
    """Parses a JSON object of limited size. Raises ValueError."""
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"it has {len(value)} bytes, at most {MAX_VALUE_BYTES} are allowed")
    try:
        entry = json.loads(value)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON object is expected, not {type(entry).__name__}")
    return entry


def _text(entry: dict[str, Any], field: str) -> str:
    """Returns a text field that is not empty. Raises ValueError."""
    value = entry.get(field)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{field}: a text is expected")
    return value


def _number(entry: dict[str, Any], field: str) -> int:
    return _whole(entry.get(field), field, 0)


def _whole(value: Any, field: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_NUMBER:
        raise ValueError(f"{field}: a whole number of at least {least} is expected")
    return value


def _groups(entry: dict[str, Any]) -> tuple[Retention, ...]:
    """Returns the retention rules of an entry's KV groups, from its windows in tokens (0: full attention) and block
    size; empty without windows. Raises ValueError."""
    windows = entry.get("windows", [])
    if not isinstance(windows, list) or len(windows) > MAX_GROUPS:
        raise ValueError(f"windows: a list of at most {MAX_GROUPS} numbers is expected")
    size = _whole(entry.get("block_size", 1), "block_size", 1)
    lengths = [_whole(window, "windows", 0) for window in windows]
    return tuple(retention_of(Window(length) if length else FULL, size) for length in lengths)
