"""Conversion of `system` and `messages` of a body to the messages that chat templates read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quire.services.frontend.anthropic_edge.block_schemas import SERVER_RUN, THOUGHTS
from quire.services.frontend.anthropic_edge.bodies import MessageBody
from quire.services.frontend.anthropic_edge.images import IMAGE, read_image
from quire.services.frontend.anthropic_edge.text_blocks import to_text_block
from quire.services.frontend.request import conversation
from quire.shared.errors import InvalidArgument, Unimplemented

Block = Mapping[str, Any]

BILLING = "x-anthropic-billing-header:"


def to_messages(system: str | Sequence[Block] | None, messages: Iterable[MessageBody]) -> list[Mapping[str, Any]]:
    """Converts the system prompt, less its billing header, and the messages. A user's tool results become messages
    of their own. Raises InvalidArgument with the place, as messages[0].content."""
    written: list[Mapping[str, Any]] = []
    if system and (text := _joined(_without_billing(_texts_alone(system, "system")))):
        written.append(conversation.message("system", text))
    for number, message in enumerate(messages):
        blocks = _text_blocks(message.content, f"messages[{number}].content")
        if message.role == "assistant":
            written.append(_assistant(blocks, f"messages[{number}].content"))
        else:
            written.extend(_others(message.role, blocks, f"messages[{number}].content"))
    return written


def _text_blocks(content: Any, place: str) -> list[Block]:
    """Returns content as blocks; a text becomes one block, and documents and search results become text. Raises
    InvalidArgument if it is no list of objects, or a text block has no text."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise InvalidArgument(f"{place} must be text or a list of blocks", field=_field(place))
    blocks = [to_text_block(block) for block in blocks]
    for block in blocks:
        if block.get("type") == "text" and not isinstance(block.get("text"), str):
            raise InvalidArgument(f"{place}: a block of type text needs text", field=_field(place))
    return blocks


def _texts_alone(content: Any, place: str) -> list[Block]:
    """Returns the blocks of a content in which only text is allowed; raises Unimplemented for others."""
    blocks = _text_blocks(content, place)
    for block in blocks:
        if block.get("type") != "text":
            raise _not_offered(block, place)
    return blocks


def _without_billing(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yields the blocks without Claude Code's billing line.

    The line differs from request to request, and as the first line of the prompt it would prevent prefix cache hits.
    """
    for block in blocks:
        text = block["text"]
        if text.lstrip().startswith(BILLING):
            text = text.lstrip().partition("\n")[2].lstrip("\n")
        if text or not block["text"]:
            yield {**block, "text": text}


def _field(place: str) -> str:
    return place.partition("[")[0]


def _joined(blocks: Iterable[Block]) -> str:
    return "\n".join(block["text"] for block in blocks if block.get("type") == "text")


def _assistant(blocks: Sequence[Block], place: str) -> Mapping[str, Any]:
    """Returns the assistant's message without thoughts encrypted elsewhere and tools run by other servers."""
    for block in blocks:
        if block.get("type") not in ("text", "tool_use", *THOUGHTS, *SERVER_RUN):
            raise _not_offered(block, place)
    calls = [_call(block, place) for block in blocks if block["type"] == "tool_use"]
    thoughts = "\n".join(str(block.get("thinking") or "") for block in blocks if block["type"] == "thinking")
    text = _joined(blocks)
    return conversation.message("assistant", text or (None if calls else ""), tool_calls=calls, reasoning=thoughts)


def _call(block: Block, place: str) -> Mapping[str, Any]:
    """Converts a tool_use block to a tool call; raises InvalidArgument unless it has a name and an input object."""
    name, arguments = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise InvalidArgument(f"{place}: a block of type tool_use needs a name and an input object", field="messages")
    return conversation.tool_call(str(block.get("id") or ""), name, arguments)


def _others(role: str, blocks: Iterable[Block], place: str) -> Iterator[Mapping[str, Any]]:
    """Yields a message for each run of text, and one for each tool result."""
    moved = False  # whether all of them are pictures of the results before
    pending: list[Block] = []  # texts and pictures of the next message; pictures in results come after the results
    for block in blocks:
        kind = block.get("type")
        if kind == "text" or (kind == IMAGE and role == "user"):
            pending, moved = [*pending, block], False
        elif kind == "tool_result" and role == "user":
            if pending and not moved:
                yield conversation.message(role, _content(pending, place))
                pending = []
            message, pictures = _result(block, place)
            yield message
            pending, moved = [*pending, *pictures], True
        else:
            raise _not_offered(block, place)
    if pending:
        yield conversation.message(role, _content(pending, place))


def _content(blocks: Sequence[Block], place: str) -> str | list[Mapping[str, Any]]:
    """Returns the texts of blocks, or, if there are pictures among them, their parts in order."""
    if all(block.get("type") == "text" for block in blocks):
        return _joined(blocks)
    return [
        {"type": "text", "text": block["text"]} if block.get("type") == "text" else read_image(block, place)
        for block in blocks
    ]


def _result(block: Block, place: str) -> tuple[Mapping[str, Any], list[Block]]:
    """Converts a tool_result block to a message of role tool; the text of a failed call is prefixed with "Error: ".
    Returns it and the pictures in the result, for a message of the user after the results."""
    content = block.get("content")
    blocks = _text_blocks("" if content is None else content, place)
    pictures = [inner for inner in blocks if inner.get("type") == IMAGE]
    text = _joined(_texts_alone([inner for inner in blocks if inner.get("type") != IMAGE], place))
    failed = "Error: " if block.get("is_error") else ""  # templates have no other way to say so
    message = conversation.message("tool", failed + text, tool_call_id=str(block.get("tool_use_id") or ""))
    return message, pictures


def _not_offered(block: Block, place: str) -> Unimplemented:
    return conversation.unsupported_part(f"{place}: blocks", block.get("type"), _field(place))
