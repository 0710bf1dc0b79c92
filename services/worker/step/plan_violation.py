"""Error for plans that break the slot protocol."""

from __future__ import annotations

from typing import Any


class PlanViolation(Exception):
    """Raised when a plan contradicts the worker's slot table: scheduler and worker are out of sync."""


def require(holds: bool, text: Any) -> None:
    """Raises PlanViolation with text() unless `holds`; the text is built lazily."""
    if not holds:
        raise PlanViolation(text())
