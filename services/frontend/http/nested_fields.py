"""Fields of the objects inside a body: those that no edge knows meet the same policy as the body's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from services.frontend.http.unknown_fields import UnknownFields


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of object: its fields, and the kinds of those that hold objects or lists of objects."""

    fields: frozenset[str]
    inner: Mapping[str, Shape] = field(default_factory=dict)
    opaque: frozenset[str] = frozenset()  # values of `type` whose other fields are not read and not checked


def check_objects(unknown: UnknownFields, value: Any, shape: Shape, place: str) -> None:
    """Raises InvalidArgument for a field that is refused. `value`: an object, or a list of objects, at `place`. A name
    is counted once, however many of the objects have it."""
    found = {(id(kind), name): (kind, where, name) for kind, where, name in _unfamiliar(value, shape, place)}
    for kind, where, name in found.values():
        unknown.check([name], kind.fields, f"{where}.")


def _unfamiliar(value: Any, shape: Shape, place: str) -> Iterator[tuple[Shape, str, str]]:
    """Yields the fields that are not of the shape: the kind of their object, its place, and their name."""
    if isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _unfamiliar(entry, shape, f"{place}[{number}]")
    elif isinstance(value, dict) and not _is_opaque(value, shape):
        for name in sorted(value.keys() - shape.fields):
            yield shape, place, name
        for name in shape.inner.keys() & value.keys():
            yield from _unfamiliar(value[name], shape.inner[name], f"{place}.{name}")


def _is_opaque(value: Mapping[str, Any], shape: Shape) -> bool:
    kind = value.get("type")
    return isinstance(kind, str) and kind in shape.opaque


def check_models(unknown: UnknownFields, model: BaseModel, place: str = "") -> None:
    """Raises InvalidArgument for a field that is refused in the models inside of a body."""
    for name in model.model_fields_set & type(model).model_fields.keys():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            _check_model(unknown, value, f"{place}{name}")
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for number, entry in enumerate(value):
                _check_model(unknown, entry, f"{place}{name}[{number}]")


def _check_model(unknown: UnknownFields, model: BaseModel, place: str) -> None:
    fields = {one.alias or name for name, one in type(model).model_fields.items()}
    unknown.check((model.model_extra or {}).keys(), fields, f"{place}.")
    check_models(unknown, model, f"{place}.")
