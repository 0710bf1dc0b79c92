"""Descriptions in the OpenAPI document of fields that a body accepts without a place in its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def body_schema_extra(
    ignored_fields: Iterable[str] = (),
    not_offered: Mapping[str, Sequence[Any]] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
) -> Callable[[dict[str, Any]], None]:
    """Returns a model's `json_schema_extra`. `ignored_fields`: fields that may hold anything. `not_offered`: by name,
    the
    values that ask for nothing; with any other the body is refused. `rules`: schemas that all hold. Fields that are
    neither in the model nor here are ignored (http/fields/unknown_fields.py), or refused with strict_request_fields."""

    def describe(schema: dict[str, Any]) -> None:
        known = schema.setdefault("properties", {})
        for name in sorted(ignored_fields):
            known.setdefault(name, {"description": "accepted, without effect"})
        for name, nothing in sorted((not_offered or {}).items()):
            known.setdefault(name, {"description": "not offered", "enum": [*nothing]})
        if rules:
            schema["allOf"] = [*rules]

    return describe
