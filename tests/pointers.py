"""What a function that stands for one of a C library finds in its arguments."""

from __future__ import annotations

from typing import Any


def pointee(argument: Any) -> Any:
    """Returns the object that `ctypes.byref(object)` points to."""
    return argument._obj
