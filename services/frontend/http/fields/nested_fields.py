"""Unknown fields of nested objects, treated like those of the body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.services.frontend.http.fields.unknown_fields import MAX_NAMES, UnknownFields, too_many_names

Path = tuple[Any, int | str] | None
"""Linked path: (parent path, index or field name); None: the root."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Describes one kind of object: its fields, and the kinds of nested objects."""

    fields: frozenset[str]
    inner: Mapping[str, Shape] = field(default_factory=dict)
    opaque: frozenset[str] = frozenset()  # values of `type` for which other fields are ignored and not checked


def check_objects(unknown: UnknownFields, value: Any, shape: Shape, place: str) -> None:
    """Raises InvalidArgument for a refused field. `value`: an object or a list of objects, at `place`. Each unknown
    name counts once, however many objects have it."""
    unknown_names: dict[tuple[int, str], tuple[Shape, Path]] = {}
    _collect(value, shape, None, unknown_names)
    if len(unknown_names) > MAX_NAMES:
        raise too_many_names(place)
    for (_, name), (kind, path) in sorted(unknown_names.items(), key=lambda entry: entry[0][1]):
        unknown.check([name], kind.fields, f"{place}{_format_path(path)}.")


def _collect(value: Any, shape: Shape, path: Path, found: dict[tuple[int, str], tuple[Shape, Path]]) -> None:
    """Collects the first place of each unknown name. Paths are linked and only formatted when needed, since
    conversations may be long."""
    if isinstance(value, list):
        for number, entry in enumerate(value):
            _collect(entry, shape, (path, number), found)
    elif isinstance(value, dict) and not (shape.opaque and _is_opaque(value, shape)):
        if not value.keys() <= shape.fields:
            for name in value.keys() - shape.fields:
                found.setdefault((id(shape), name), (shape, path))
        for name, kind in shape.inner.items():
            if isinstance(inner := value.get(name), list | dict):
                _collect(inner, kind, (path, name), found)


def _format_path(path: Path) -> str:
    """Returns a linked path as text, such as `.tools[0].function`; empty for the root."""
    if path is None:
        return ""
    before, step = path
    return _format_path(before) + (f"[{step}]" if isinstance(step, int) else f".{step}")


def _is_opaque(value: Mapping[str, Any], shape: Shape) -> bool:
    kind = value.get("type")
    return isinstance(kind, str) and kind in shape.opaque
