"""The field of a body that says which model is asked."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema


def _null_is_left_out(value: Any) -> Any:
    return "" if value is None else value


# Clients that know no name send null, or leave it out.
ModelField = Annotated[
    str,
    BeforeValidator(_null_is_left_out),
    WithJsonSchema(
        {
            "description": "the model's name; empty or null: the only one",
            "anyOf": [{"type": "string"}, {"type": "null"}],
        }
    ),
]
