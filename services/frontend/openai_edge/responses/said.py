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
# Calls that another server ran itself, and what only it can read: parts of turns that were answered elsewhere.
UNREADABLE = (
    "code_interpreter_call", "compaction", "compaction_summary", "computer_call", "context_compaction",
    "file_search_call", "ghost_snapshot", "image_generation_call", "mcp_approval_request", "mcp_approval_response",
    "mcp_call", "mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call",
)  # fmt: skip
CUSTOM, SHELL = "custom_tool_call", "local_shell_call"
OUTPUTS = ("function_call_output", f"{CUSTOM}_output", f"{SHELL}_output")
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
        {"required": ["type", "output"], "properties": {"type": {"enum": [*OUTPUTS]}, "output": TEXTS}},
        {
            "required": ["type", "name", "input"],
            "properties": {"type": {"const": CUSTOM}, "name": TEXT, "input": TEXT},
        },
        {"required": ["type", "action"], "properties": {"type": {"const": SHELL}, "action": {"type": "object"}}},
        {"required": ["type"], "properties": {"type": {"enum": [*UNREADABLE]}}},
        {
            "required": ["type"],
            "properties": {"type": {"const": "reasoning"}, "content": THOUGHTS, "summary": THOUGHTS},
        },
    ]
}
INPUT: Schema = {"minItems": 1, "items": {"type": "object", **ITEM}}
