"""What a client hears that asks for a model which is not there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.shared.errors import NotFound

MAX_LISTED = 16


def model_not_found(name: str, models: Sequence[str], adapters: Iterable[str]) -> NotFound:
    """`models`: names of the one that is served; `adapters`: of it."""
    known = [*models, *sorted(set(adapters) - {*models})]
    listed = ", ".join(known[:MAX_LISTED]) + (f" and {len(known) - MAX_LISTED} more" * (len(known) > MAX_LISTED))
    return NotFound(f"The model `{name}` does not exist; available: {listed}.", field="model")
