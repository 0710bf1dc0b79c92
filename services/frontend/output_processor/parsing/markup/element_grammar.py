"""Format of arguments that are written as nested elements, for required calls; a value in another form is JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.output_processor.parsing.call_grammar import Json, optional, parameter_value, sequence
from quire.services.frontend.output_processor.parsing.tool_schemas import resolved

DEEPEST = 6  # elements; deeper values are JSON
ITEM = "item"


def member_elements(mark: str, schema: Any, root: Mapping[str, Any], depth: int = 0) -> list[Json]:
    """Returns an element for each declared property of an object, in the order of the schema; those that are not
    required are optional. `mark`: text before each tag; `root`: the schema that references resolve against."""
    needed = schema.get("required") or ()
    members = []
    for key, document in (schema.get("properties") or {}).items():
        element = _element(mark, key, document, root, depth)
        members.append(element if key in needed else optional(element))
    return members


def _element(mark: str, key: str, document: Any, root: Mapping[str, Any], depth: int) -> Json:
    content = _content(mark, resolved(document, root), root, depth)
    return {"type": "tag", "begin": f"{mark}<{key}>", "content": content, "end": f"{mark}</{key}>"}


def _content(mark: str, document: Any, root: Mapping[str, Any], depth: int) -> Json:
    """Returns the format of a value: elements of an object's declared properties or of a list's items, else text or
    JSON."""
    kind = document.get("type") if isinstance(document, Mapping) else None
    if depth < DEEPEST and kind == "object" and document.get("properties"):
        return sequence(*member_elements(mark, document, root, depth + 1))
    if depth < DEEPEST and kind == "array" and isinstance(document.get("items"), Mapping):
        item = _element(mark, ITEM, document["items"], root, depth + 1)
        return {"type": "star", "content": item}
    return parameter_value(document, root)
