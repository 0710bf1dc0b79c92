"""What the OpenAPI document says of the blocks of a conversation, which turns.py reads."""

from __future__ import annotations

from services.frontend.http.ranges import Schema, needs

THOUGHTS = ("thinking", "redacted_thinking")

TEXT: Schema = {"required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
RESULT: Schema = {
    "required": ["type"],
    "properties": {
        "type": {"const": "tool_result"},
        "content": {"type": ["string", "array", "null"], "items": {"type": "object", **TEXT}},
    },
}
USE: Schema = {
    "required": ["type", "name"],
    "properties": {
        "type": {"const": "tool_use"},
        "name": {"type": "string", "minLength": 1},
        "input": {"type": "object"},
    },
}
THOUGHT: Schema = {"required": ["type"], "properties": {"type": {"enum": [*THOUGHTS]}}}
SYSTEM: Schema = {"items": {"type": "object", **TEXT}}
BLOCKS = {"user": (TEXT, RESULT), "assistant": (TEXT, USE, THOUGHT), "system": (TEXT,)}  # by the role of their message
OF_ROLES = [
    needs("role", {"const": role}, "content", {"items": {"anyOf": [*blocks]}}) for role, blocks in BLOCKS.items()
]
