"""Extensions from other packages, found by Python's entry points, by group (`quire.models`, `quire.attention_backends`,
...).

A table of built-in names maps each to "module:attribute"; `known` adds the names that installed packages declare.
Nothing is imported before it is requested by name.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from quire.shared.errors import InvalidArgument


def known(group: str, built_in: Mapping[str, str]) -> dict[str, str]:
    """Returns name -> "module:attribute" of the built-in and the declared names, without importing anything. Raises
    InvalidArgument for a name that stands for two different objects."""
    found = dict(built_in)
    for point in _declared(group, tuple(sys.path)):
        other = found.setdefault(point.name, point.value)
        if other != point.value:
            raise InvalidArgument(
                f"{group}: {point.name} is declared twice, as {other} and as {point.value}", field=group
            )
    return found


@functools.cache
def _declared(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Returns the entry points of a group; `path` is part of the cache key."""
    return entry_points(group=group)


def load(reference: str) -> Any:
    """Imports and returns the object that "module:attribute" names."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)
