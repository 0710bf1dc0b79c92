"""Converts messages and tools of the public protocol to the form that chat templates read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.services.frontend.request import conversation
from quire.services.frontend.request.media import MediaOptions, MediaPart, PartOrigin, VideoMetadata
from quire.services.frontend.request.media_options import media_options
from quire.services.frontend.request.request import ChatPrompt, Tool
from quire.services.frontend.request.tool_offer import (
    AUTO,
    NONE,
    REQUIRED,
    ToolOffer,
    build_tool_offer,
    new_tool,
    to_openai_tool,
)
from quire.services.frontend.request.video_options import video_metadata
from quire.shared import strict_json
from quire.shared.errors import InvalidArgument
from quire.shared.media.modalities import IMAGE
from quire.shared.pb.inference.v1 import inference_pb2 as pb

ROLES = ("system", "developer", "user", "assistant", "tool")
MODES: Mapping[int, str] = {
    pb.ToolChoice.MODE_UNSPECIFIED: AUTO,
    pb.ToolChoice.MODE_NONE: NONE,
    pb.ToolChoice.MODE_AUTO: AUTO,
    pb.ToolChoice.MODE_REQUIRED: REQUIRED,
}


def messages(written: Iterable[pb.ChatMessage]) -> list[Mapping[str, Any]]:
    return [_message(message) for message in written]


def _message(message: pb.ChatMessage) -> Mapping[str, Any]:
    """Converts one message of a conversation. Raises InvalidArgument for an unknown role."""
    if message.role not in ROLES:
        raise InvalidArgument(
            f"messages: role must be one of {', '.join(ROLES)}, got {message.role!r}", field="messages"
        )
    return conversation.message(
        message.role,
        _content(message),
        name=message.name,
        tool_calls=[conversation.tool_call(call.id, call.name, call.arguments) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _content(message: pb.ChatMessage) -> str | list[Mapping[str, Any]]:
    """Returns the text of a message, or its parts. Raises InvalidArgument for both, and for an empty part."""
    if not message.parts:
        return message.content
    if message.content:
        raise InvalidArgument("messages: a message has content or parts, not both", field="messages")
    return [_part(part) for part in message.parts]


def user_content(parts: Iterable[pb.ContentPart]) -> str | ChatPrompt:
    """Returns texts alone as a text, and other parts as a message of the user. Raises InvalidArgument for an empty
    part."""
    content = [_part(part) for part in parts]
    if all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return conversation.chat_prompt([conversation.message("user", content)], add_generation_prompt=False)


def _part(part: pb.ContentPart) -> Mapping[str, Any]:
    """Converts a part of a message. Raises InvalidArgument if it is not set."""
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text}
        case "image" | "video" | "audio" as modality:
            given: pb.MediaPart = getattr(part, modality)
            return conversation.content_part(media_part(given, PartOrigin(kind=modality), modality))
    raise InvalidArgument("messages: a part of a message must be set", field="messages")


def media_part(part: pb.MediaPart, origin: PartOrigin, modality: str = IMAGE) -> MediaPart:
    """Converts a media item. Raises InvalidArgument for one without a source and a name."""
    source = part.WhichOneof("source")
    if source is None and not part.name:
        raise InvalidArgument(f"{origin.place} of type {modality} need content, url or name", field=origin.field)
    return MediaPart(
        part.url if source == "url" else None,
        part.content if source == "content" else None,
        name=part.name,
        origin=origin,
        modality=modality,
        metadata=_video_metadata(part.frames, origin) if part.HasField("frames") else None,
    )


def _video_metadata(frames: pb.VideoFrames, origin: PartOrigin) -> VideoMetadata:
    """Converts the facts about the frames of a video. Raises InvalidArgument for wrong ones."""
    given = {
        "fps": frames.fps or None,
        "total_num_frames": frames.total_num_frames or None,
        "frames_indices": [*frames.frames_indices] or None,
        "duration": frames.duration_s or None,
    }
    return video_metadata(given, f"{origin.field}.frames")


def options_of_media(message: pb.MediaOptions) -> MediaOptions:
    """Converts the options of pictures. Raises InvalidArgument for text that is no JSON object, and for unknown
    options."""
    found = [_json(name, text) for name, text in (("processor", message.processor), ("io", message.io))]
    for name, value in zip(("processor", "io"), found, strict=True):
        if not isinstance(value, dict):
            raise InvalidArgument(f"media_options.{name} must be a JSON object", field="media_options")
    return media_options(*found)


def shown_tools(tools: Iterable[pb.Tool]) -> list[dict[str, Any]]:
    """Returns the tools for calls that only render the template."""
    return [to_openai_tool(tool) for tool in _tools(tools)]


def tool_offer(message: pb.ChatRequest) -> ToolOffer:
    """Returns the tools and the tool choice of a chat. Raises InvalidArgument for an unknown mode, or a choice that
    does not fit the tools."""
    choice = message.tool_choice
    if choice.mode not in MODES:
        raise InvalidArgument(f"tool_choice: {choice.mode} is not a value of ToolChoice.Mode", field="tool_choice")
    mode = MODES[choice.mode]
    if choice.name and mode != REQUIRED:
        raise InvalidArgument("tool_choice: a name requires MODE_REQUIRED", field="tool_choice")
    if not message.tools:
        if choice.mode not in (pb.ToolChoice.MODE_UNSPECIFIED, pb.ToolChoice.MODE_NONE):
            raise InvalidArgument("tool_choice: when it is used, tools must be set", field="tool_choice")
        return ToolOffer()
    parallel = not message.HasField("parallel_tool_calls") or message.parallel_tool_calls
    return build_tool_offer(_tools(message.tools), mode, choice.name, parallel=parallel)


def _tools(tools: Iterable[pb.Tool]) -> list[Tool]:
    """Returns the validated tools. Raises InvalidArgument that names the tool by its number."""
    return [
        new_tool(f"tools[{number}]", tool.name, _json("tools", tool.parameters), tool.description, tool.strict)
        for number, tool in enumerate(tools)
    ]


def variables(text: str) -> Mapping[str, Any]:
    """Returns the template variables of the JSON text; none for an empty text. Raises InvalidArgument unless it is an
    object."""
    found = _json("chat_template_kwargs", text)
    if not isinstance(found, dict):
        raise InvalidArgument("chat_template_kwargs must be a JSON object", field="chat_template_kwargs")
    return found


def _json(field: str, text: str) -> Any:
    """Parses strict JSON; an empty text is an empty object. Raises InvalidArgument that names `field`."""
    try:
        return strict_json.read(text or "{}")
    except ValueError as error:
        raise InvalidArgument(f"{field} is not JSON: {error}", field=field) from None
