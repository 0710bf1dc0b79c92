"""What a client hears that asks for a model which is not there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.shared.errors import NotFound

MOST_LISTED = 16


def no_model(name: str, models: Sequence[str], adapters: Iterable[str]) -> NotFound:
    """`models`: names of the one that is served; `adapters`: of it."""
    known = [*models, *sorted(set(adapters) - {*models})]
    listed = ", ".join(known[:MOST_LISTED]) + (f" and {len(known) - MOST_LISTED} more" * (len(known) > MOST_LISTED))
    return NotFound(f"The model `{name}` does not exist; available: {listed}.", field="model")
