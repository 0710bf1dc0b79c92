"""Results of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from quire.shared.errors import QuireError

Level = Literal["ok", "warning", "error"]
MARKS: dict[Level, str] = {"ok": "ok", "warning": "WARN", "error": "FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; `advice`: what to do if it is not ok."""

    subject: str
    level: Level
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def ok(subject: str, found: str) -> Finding:
    return Finding(subject, "ok", found)


def warning(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject, "warning", found, advice)


def error(subject: str, found: str, advice: str) -> Finding:
    return Finding(subject, "error", found, advice)


def run_check(subject: str, look: Callable[[], Iterable[Finding]], advice: str) -> Iterator[Finding]:
    """Yields the findings of `look`; an error that it raises becomes another finding."""
    try:
        yield from look()
    except QuireError as refusal:
        yield error(subject, refusal.message, advice)


def table(findings: Iterable[Finding]) -> str:
    """Returns the findings as aligned lines, each with its advice below."""
    rows = list(findings)
    width = max(len(row.subject) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{MARKS[row.level]:<4}  {row.subject:<{width}}  {row.found}")
        if row.advice:
            lines.append(f"      {'':<{width}}  -> {row.advice}")
    return "\n".join(lines)
