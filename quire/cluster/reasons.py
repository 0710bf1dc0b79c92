"""Why a process ended, read from the last lines of its stderr."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable

OWN_LINE = "quire: "  # prefix of the line with which a service refuses to start (shared/process/lifecycle.py)
SEVERE = ("error", "critical")
ORDINARY = re.compile(r"\d\d:\d\d:\d\d\.\d{3} [DIW] ")  # a log line of text that reports no error


def possible_reason(line: str) -> str:
    """Returns what of a line may explain the end of its process: an error's message and exception where the log is
    JSON, nothing of an ordinary log line, and any other line as it is."""
    line = line.strip()
    entry = log_entry(line)
    if entry is None:
        return "" if ORDINARY.match(line) else line
    if entry.get("level") not in SEVERE:
        return ""
    trace = str(entry.get("exception", "")).splitlines()
    return ": ".join([str(entry.get("message", "")), *trace[-1:]])


def reason_of(lines: Iterable[str]) -> str:
    """Returns the reason among possible ones: the line with which a service refuses to start, otherwise all of them;
    empty without any."""
    found = [line for line in lines if line]
    said = [line.removeprefix(OWN_LINE) for line in found if line.startswith(OWN_LINE)]
    return said[-1] if said else " | ".join(found)


def log_entry(line: str) -> dict[str, object] | None:
    """Returns the object of a JSON log line; None for any other line."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            return entry if isinstance(entry, dict) else None
    return None
