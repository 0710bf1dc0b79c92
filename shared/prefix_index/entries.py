"""Entries of the registry and the index as Redis holds them, where anybody with its password may have written."""

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
    """A scheduler that renewed its lease."""

    id: str
    address: str
    epoch: int
    num_workers: int
    draining: bool = False  # it takes nobody


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """A worker whose scheduler renewed its lease: only its present epoch is believed."""

    id: str
    epoch: int
    scheduler: str
    groups: tuple[Retention, ...] = ()  # of KV; none: a single one that keeps everything


class MalformedEntries:
    """Counts entries that cannot be read, and logs one of them a minute at most."""

    def __init__(self, count: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`count` gets the kind of each: scheduler or worker."""
        self._count = count
        self._clock = clock
        self._logged_at = -LOG_INTERVAL_S
        self._num_silent = 0

    def add(self, kind: str, name: bytes, reason: str) -> None:
        self._count(kind)
        now = self._clock()
        if now - self._logged_at < LOG_INTERVAL_S:
            self._num_silent += 1
            return
        shown = name[:MAX_NAME_BYTES].decode(errors="backslashreplace")
        log.warning(
            "an entry in redis cannot be read and is skipped",
            kind=kind,
            id=shown,
            reason=reason,
            others_since_the_last_line=self._num_silent,
        )
        self._logged_at, self._num_silent = now, 0


LOG_ONLY = MalformedEntries(lambda _kind: None)  # only logged


def scheduler_entry(name: str, value: bytes) -> SchedulerEntry:
    """Raises ValueError."""
    entry = _fields(value)
    numbers = _number(entry, "epoch"), _number(entry, "num_workers")
    return SchedulerEntry(name, _text(entry, "address"), *numbers, bool(entry.get("draining")))


def worker_entry(name: str, value: bytes) -> WorkerEntry:
    """Raises ValueError."""
    entry = _fields(value)
    return WorkerEntry(name, _number(entry, "epoch"), _text(entry, "scheduler"), _groups(entry))


def name_of(data: bytes) -> str:
    """Raises ValueError."""
    if not 0 < len(data) <= MAX_NAME_BYTES:
        raise ValueError(f"an id has 1 to {MAX_NAME_BYTES} bytes, not {len(data)}")
    return data.decode()


def _fields(value: bytes) -> dict[str, Any]:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"it has {len(value)} bytes, and {MAX_VALUE_BYTES} are the most")
    try:
        entry = json.loads(value)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON object is expected, not {type(entry).__name__}")
    return entry


def _text(entry: dict[str, Any], field: str) -> str:
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
    windows = entry.get("windows", [])
    if not isinstance(windows, list) or len(windows) > MAX_GROUPS:
        raise ValueError(f"windows: a list of at most {MAX_GROUPS} numbers is expected")
    size = _whole(entry.get("block_size", 1), "block_size", 1)
    lengths = [_whole(window, "windows", 0) for window in windows]
    return tuple(retention_of(Window(length) if length else FULL, size) for length in lengths)
