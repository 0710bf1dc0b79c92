"""OpenAPI descriptions of fields that a body accepts without declaring them in its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def body_schema_extra(
    ignored_fields: Iterable[str] = (),
    not_offered: Mapping[str, Sequence[Any]] | None = None,
    rules: Sequence[Mapping[str, Any]] = (),
) -> Callable[[dict[str, Any]], None]:
    """Returns a model's `json_schema_extra`. `ignored_fields`: accepted with any value. `not_offered`: field name ->
    values without effect; others are refused. `rules`: schemas that must all hold. Undeclared fields are ignored
    (http/fields/unknown_fields.py), or refused with strict_request_fields."""

    def describe(schema: dict[str, Any]) -> None:
        """Adds the ignored and the refused fields and the rules to a model's schema, in place."""
        known = schema.setdefault("properties", {})
        for name in sorted(ignored_fields):
            known.setdefault(name, {"description": "accepted, without effect"})
        for name, nothing in sorted((not_offered or {}).items()):
            known.setdefault(name, {"description": "not supported", "enum": [*nothing]})
        if rules:
            schema["allOf"] = [*rules]

    return describe
