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

CONTENT = {
    "type": "object",
    "required": ["content"],
    "properties": {"content": {"type": "array", "items": {"type": "object"}, **NOT_EMPTY}},
    "description": "texts and pictures as parts of a message's content",
}
TEXT_OBJECT = {"type": "object", "required": ["text"], "properties": {"text": TEXT}}
PICTURE_OBJECT = {"type": "object", "required": ["image"], "properties": {"image": TEXT}}
ONE = {"anyOf": [TEXT, TEXT_OBJECT, PICTURE_OBJECT, CONTENT]}
ScoredInputField = Annotated[str | dict[str, Any], WithJsonSchema(ONE)]
ScoredInputsField = Annotated[
    str | dict[str, Any] | list[str | dict[str, Any]],
    WithJsonSchema({"anyOf": [*ONE["anyOf"], {"type": "array", "items": ONE, **NOT_EMPTY}]}),
]


def read_scored_inputs(given: Any, field: str) -> list[ScoredInput]:
    """Returns the texts and contents of a field that holds one or a list of them. Raises InvalidArgument."""
    if not isinstance(given, list):
        return [read_scored_input(given, field)]
    return [read_scored_input(one, f"{field}.{index}") for index, one in enumerate(given)]


def read_scored_input(one: Any, field: str) -> ScoredInput:
    """Returns a query or document: a text, {"text": ...}, {"image": URL} as in Jina's API, or {"content": [parts]} as
    in vLLM's. Raises InvalidArgument for anything else."""
    if isinstance(one, str):
        return one
    if isinstance(one, Mapping) and isinstance(one.get("text"), str) and "image" not in one:
        return str(one["text"])
    if isinstance(one, Mapping) and isinstance(one.get("image"), str) and "text" not in one:
        picture = MediaPart(one["image"], origin=PartOrigin(field, "image", field))
        return scored_content([conversation.content_part(picture)])
    content = one.get("content") if isinstance(one, Mapping) else None
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
