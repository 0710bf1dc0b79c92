"""What the OpenAPI document says of bodies that are read with any field, so as to refuse an unknown one by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

NULL = {"type": "null", "description": "not offered"}


def closed(read_over: Iterable[str] = (), not_offered: Iterable[str] = ()) -> Callable[[dict[str, Any]], None]:
    """A model's `json_schema_extra`: its fields and these are all. `read_over`: may hold anything; `not_offered`: are
    refused where they ask for something."""

    def describe(schema: dict[str, Any]) -> None:
        known = schema.setdefault("properties", {})
        for name in sorted(read_over):
            known.setdefault(name, {"description": "accepted, without effect"})
        for name in sorted(not_offered):
            known.setdefault(name, NULL)
        schema["additionalProperties"] = False

    return describe
