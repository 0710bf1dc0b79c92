"""Parts of an engine in its user's process that the user does not see."""

from __future__ import annotations

from typing import Any


def engine_core_of(engine: Any) -> Any:
    """Returns the one worker, and what schedules it."""
    return engine._engine._engine_core
