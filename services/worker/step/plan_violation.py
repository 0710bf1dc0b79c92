"""What a plan that cannot be meant leads to."""

from __future__ import annotations

from typing import Any


class PlanViolation(Exception):
    """The scheduler and this worker do not have the same table any more."""


def require(holds: bool, text: Any) -> None:
    """`text` is a function: messages are only made when needed."""
    if not holds:
        raise PlanViolation(text())
