"""Decorator for values that every step creates: immutable for the type checker, cheap at run time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Value = TypeVar("Value")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def step_value(cls: type[Value]) -> type[Value]:
    """Makes a dataclass with slots that type checkers treat as frozen. At run time it is not frozen, because a
    frozen one sets every field by a function call, which costs more than ten microseconds for the hundred fields of
    a worker's step."""
    return dataclass(slots=True)(cls)
