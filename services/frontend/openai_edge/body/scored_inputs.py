"""Queries and documents of /score and /rerank: texts, and objects with texts and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import WithJsonSchema

from quire.services.frontend.input_processor.pooling.scoring import ScoredInput
from quire.services.frontend.openai_edge.body.field_schemas import NOT_EMPTY, TEXT
from quire.services.frontend.openai_edge.body.media_parts import read_media_part
from quire.services.frontend.request import conversation
from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.shared.errors import InvalidArgument

PARTS = {"type": "array", "items": {"type": "object"}, **NOT_EMPTY}
CONTENT = {"type": "object", "required": ["content"], "properties": {"content": PARTS}}
TEXT_OBJECT = {"type": "object", "required": ["text"], "properties": {"text": TEXT}}
PICTURE_OBJECT = {"type": "object", "required": ["image"], "properties": {"image": TEXT}}
PART = {"type": "object", "required": ["type"]}
FORMS: list[dict[str, Any]] = [TEXT, TEXT_OBJECT, PICTURE_OBJECT, CONTENT, PART]
ScoredInputField = Annotated[str | dict[str, Any], WithJsonSchema({"anyOf": FORMS})]
ScoredInputsField = Annotated[
    str | dict[str, Any] | list[Any],
    WithJsonSchema({"anyOf": [*FORMS, {"type": "array", "items": {"anyOf": FORMS}, **NOT_EMPTY}]}),
]


def read_scored_inputs(given: Any, field: str, *, has_several: bool = True) -> list[ScoredInput]:
    """Returns the texts and contents of a field that holds one or a list of them. `has_several`: each part of a single
    content is an input of its own, as vLLM's clients send documents. Raises InvalidArgument."""
    content = given.get("content") if isinstance(given, Mapping) else None
    if has_several and isinstance(content, list) and content:
        given = content
    if not isinstance(given, list):
        return [read_scored_input(given, field)]
    return [read_scored_input(one, f"{field}.{index}") for index, one in enumerate(given)]


def read_scored_input(one: Any, field: str) -> ScoredInput:
    """Returns a query or document: a text, {"text": ...}, {"image": URL} as in Jina's API, a part of a message's
    content, or {"content": [parts]}. Raises InvalidArgument for anything else."""
    if isinstance(one, str):
        return one
    given = one if isinstance(one, Mapping) else {}
    if isinstance(given.get("text"), str) and "image" not in given:
        return str(given["text"])
    if isinstance(given.get("image"), str) and "text" not in given:
        picture = MediaPart(given["image"], origin=PartOrigin(field, "image", field))
        return scored_content([conversation.content_part(picture)])
    content = [given] if isinstance(given.get("type"), str) else given.get("content")
    if not isinstance(content, list) or not content:
        raise InvalidArgument(
            f'{field} must be a text, {{"text": ...}}, {{"image": URL}} or {{"content": [parts]}}', field=field
        )
    return scored_content([_part(part, field) for part in content])


def scored_content(parts: Sequence[Mapping[str, Any]]) -> ScoredInput:
    """Returns texts alone as a text, and other parts as a message of the user."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return conversation.chat_prompt([conversation.message("user", parts)], add_generation_prompt=False)


def _part(part: Any, field: str) -> Mapping[str, Any]:
    origin = PartOrigin(f"{field}: parts", field=field)
    if media := read_media_part(part, origin):
        return media
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise conversation.unsupported_part(origin.place, kind, field)
    if not isinstance(part.get("text"), str):
        raise InvalidArgument(f"{field}: a part of type 'text' needs its text", field=field)
    return {"type": "text", "text": part["text"]}
