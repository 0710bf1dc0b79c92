"""Conversion of clients' integers that are sent back."""

from __future__ import annotations

import sys
from typing import Any

import orjson


def json_safe(value: Any) -> Any:
    """Returns a value that orjson can write: integers beyond 64 bits become floats, as in most JSON readers."""
    try:
        orjson.dumps(value)
    except TypeError:
        return _fit_64_bits(value)
    return value


def _fit_64_bits(value: Any) -> Any:
    """Returns the value with integers outside of 64 bits as floats, which orjson can encode; beyond a float's range,
    its largest. Descends into objects and lists."""
    if isinstance(value, dict):
        return {name: _fit_64_bits(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_fit_64_bits(one) for one in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        try:
            return float(value)
        except OverflowError:
            return sys.float_info.max if value > 0 else -sys.float_info.max
    return value
