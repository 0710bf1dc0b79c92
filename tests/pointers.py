"""Helpers for functions that stand in for a C library's."""

from __future__ import annotations

from typing import Any


def pointee(argument: Any) -> Any:
    """Returns the object that `ctypes.byref(object)` points to."""
    return argument._obj
