"""Optional fields that also accept null, for clients that send null instead of omitting a field."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticUseDefault


def _default_for_null(value: Any) -> Any:
    """Returns the value; null makes pydantic use the field's default."""
    if value is None:
        raise PydanticUseDefault
    return value


Flag = Annotated[
    bool, BeforeValidator(_default_for_null), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "null"}]})
]
"""true or false; null: the field's default."""
OptionalText = Annotated[
    str, BeforeValidator(_default_for_null), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]})
]
"""A text; null: the field's default."""
