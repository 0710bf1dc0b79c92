"""Access to internals of an in-process engine for tests."""

from __future__ import annotations

from typing import Any


def engine_core_of(engine: Any) -> Any:
    """Returns the engine core: worker and scheduler core."""
    return engine._engine._engine_core
