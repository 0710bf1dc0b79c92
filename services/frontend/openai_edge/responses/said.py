"""What the OpenAPI document says of the items of a conversation, which turns.py reads."""

from __future__ import annotations

from services.frontend.http.ranges import Schema

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
ROLES = ("user", "assistant", "system", "developer")

TEXT: Schema = {"type": "string"}
PART: Schema = {
    "type": "object",
    "required": ["type"],
    "anyOf": [
        {"required": [key], "properties": {"type": {"const": kind}, key: TEXT}} for kind, key in TEXT_PARTS.items()
    ],
}
TEXTS: Schema = {"anyOf": [TEXT, {"type": "array", "items": PART}]}
THOUGHTS: Schema = {"type": ["array", "null"], "items": {"type": "object", "properties": {"text": TEXT}}}
ITEM: Schema = {
    "anyOf": [
        {
            "required": ["role", "content"],
            "properties": {"type": {"const": "message"}, "role": {"enum": [*ROLES]}, "content": TEXTS},
        },
        {
            "required": ["type", "name", "arguments"],
            "properties": {"type": {"const": "function_call"}, "name": TEXT, "arguments": TEXT},
        },
        {"required": ["type", "output"], "properties": {"type": {"const": "function_call_output"}, "output": TEXTS}},
        {
            "required": ["type"],
            "properties": {"type": {"const": "reasoning"}, "content": THOUGHTS, "summary": THOUGHTS},
        },
    ]
}
INPUT: Schema = {"minItems": 1, "items": {"type": "object", **ITEM}}
