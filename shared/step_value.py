"""Values that each step makes anew: nobody changes one, and the type checker sees to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Value = TypeVar("Value")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def step_value(cls: type[Value]) -> type[Value]:
    """A frozen dataclass with slots, except at run time: there a frozen one sets each field by a call, which for the
    hundred fields of a worker's step takes more than ten microseconds."""
    return dataclass(slots=True)(cls)
