"""What the OpenAPI document says of bodies that are read with any field, so as to refuse an unknown one by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def closed(
    read_over: Iterable[str] = (),
    not_offered: Mapping[str, Sequence[Any]] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
) -> Callable[[dict[str, Any]], None]:
    """A model's `json_schema_extra`: its fields and these are all. `read_over`: may hold anything. `not_offered`: by
    name, the values that ask for nothing; with any other the body is refused. `rules`: schemas that all hold."""

    def describe(schema: dict[str, Any]) -> None:
        known = schema.setdefault("properties", {})
        for name in sorted(read_over):
            known.setdefault(name, {"description": "accepted, without effect"})
        for name, nothing in sorted((not_offered or {}).items()):
            known.setdefault(name, {"description": "not offered", "enum": [*nothing]})
        schema["additionalProperties"] = False
        if rules:
            schema["allOf"] = [*rules]

    return describe
