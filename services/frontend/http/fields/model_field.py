"""The body field that names the model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema


def _null_is_left_out(value: Any) -> Any:
    return "" if value is None else value


# Clients without a model name send null or omit the field.
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
