"""The error for a request that names an unknown model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.shared.errors import NotFound

MAX_LISTED = 16


def model_not_found(name: str, models: Sequence[str], adapters: Iterable[str]) -> NotFound:
    """Returns the error for an unknown model. `models`: names of the served model; `adapters`: names of its
    adapters."""
    known = [*models, *sorted(set(adapters) - {*models})]
    listed = ", ".join(known[:MAX_LISTED]) + (f" and {len(known) - MAX_LISTED} more" * (len(known) > MAX_LISTED))
    return NotFound(f"The model `{name}` does not exist; available: {listed}.", field="model")
