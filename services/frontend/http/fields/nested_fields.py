"""Fields of the objects inside a body: those that no edge knows meet the same policy as the body's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.services.frontend.http.fields.unknown_fields import MAX_NAMES, UnknownFields, too_many_names

Path = tuple[Any, int | str] | None
"""A path before it, and an index or a field; None: the beginning."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of object: its fields, and the kinds of those that hold objects or lists of objects."""

    fields: frozenset[str]
    inner: Mapping[str, Shape] = field(default_factory=dict)
    opaque: frozenset[str] = frozenset()  # values of `type` whose other fields are not read and not checked


def check_objects(unknown: UnknownFields, value: Any, shape: Shape, place: str) -> None:
    """Raises InvalidArgument for a field that is refused. `value`: an object, or a list of objects, at `place`. A name
    is counted once, however many of the objects have it."""
    found: dict[tuple[int, str], tuple[Shape, Path]] = {}
    _collect(value, shape, None, found)
    if len(found) > MAX_NAMES:
        raise too_many_names(place)
    for (_, name), (kind, path) in sorted(found.items(), key=lambda entry: entry[0][1]):
        unknown.check([name], kind.fields, f"{place}{_written(path)}.")


def _collect(value: Any, shape: Shape, path: Path, found: dict[tuple[int, str], tuple[Shape, Path]]) -> None:
    """Notes the first place of each name that is not of its shape. Conversations may be long: a path is only linked
    here, and written when it is needed."""
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


def _written(path: Path) -> str:
    if path is None:
        return ""
    before, step = path
    return _written(before) + (f"[{step}]" if isinstance(step, int) else f".{step}")


def _is_opaque(value: Mapping[str, Any], shape: Shape) -> bool:
    kind = value.get("type")
    return isinstance(kind, str) and kind in shape.opaque
