"""Schemas of a conversation's items for the OpenAPI document; messages.py reads the items."""

from __future__ import annotations

from quire.services.frontend.http.fields.ranges import Schema

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "summary_text": "text", "refusal": "refusal"}
ROLES = ("user", "assistant", "system", "developer")

TEXT: Schema = {"type": "string"}
PICTURE: Schema = {
    "required": ["image_url"],
    "properties": {"type": {"enum": ["input_image", "image_url"]}, "image_url": {"type": ["string", "object"]}},
}
PART: Schema = {
    "type": "object",
    "required": ["type"],
    "anyOf": [
        *({"required": [key], "properties": {"type": {"const": kind}, key: TEXT}} for kind, key in TEXT_PARTS.items()),
        PICTURE,
    ],
}
TEXTS: Schema = {"anyOf": [TEXT, {"type": "array", "items": PART}, {"type": "null"}]}
# Calls that another server ran itself, and items that only it can read: parts of turns that it answered.
UNREADABLE = (
    "code_interpreter_call", "compaction", "compaction_summary", "computer_call", "computer_call_output",
    "configuration_update", "context_compaction", "file_search_call", "ghost_snapshot", "image_generation_call",
    "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "tool_search_call",
    "tool_search_output", "web_search_call",
)  # fmt: skip
ADDED_TOOLS, AGENT = "additional_tools", "agent_message"
FUNCTION, CUSTOM = "function_call", "custom_tool_call"
# Calls of tools that clients run, with a separate item type: name of the tool, and field of its arguments.
FORMS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
OUTPUTS = tuple(f"{kind}_output" for kind in (FUNCTION, CUSTOM, *FORMS))
# Alternatives to items that ask the server for something.
REPLACEMENTS = {
    "compaction_trigger": "ask for a summary in a message of the user, and send that",
    "item_reference": "send the item itself, or previous_response_id",
}
THOUGHTS: Schema = {"type": ["array", "null"], "items": {"type": "object", "properties": {"text": TEXT}}}
ITEM: Schema = {
    "anyOf": [
        {
            "required": ["role"],
            "properties": {"type": {"enum": ["message", None]}, "role": {"enum": [*ROLES]}, "content": TEXTS},
        },
        {
            "required": ["type", "name", "arguments"],
            "properties": {"type": {"const": FUNCTION}, "name": TEXT, "arguments": {"type": ["string", "object"]}},
        },
        {
            "required": ["type"],
            "properties": {"type": {"enum": [*OUTPUTS]}, "output": {"anyOf": [TEXTS, {"type": "object"}]}},
        },
        {
            "required": ["type", "name", "input"],
            "properties": {"type": {"const": CUSTOM}, "name": TEXT, "input": TEXT},
        },
        *(
            {"required": ["type", field], "properties": {"type": {"const": kind}, field: {"type": "object"}}}
            for kind, (_, field) in FORMS.items()
        ),
        {"required": ["type"], "properties": {"type": {"enum": [*UNREADABLE]}}},
        {
            "required": ["type", "tools"],
            "properties": {"type": {"const": ADDED_TOOLS}, "tools": {"type": "array", "items": {"type": "object"}}},
        },
        {
            "required": ["type", "content"],
            "properties": {"type": {"const": AGENT}, "author": TEXT, "content": TEXTS},
        },
        {
            "required": ["type"],
            "properties": {"type": {"const": "reasoning"}, "content": THOUGHTS, "summary": THOUGHTS},
        },
    ]
}
INPUT: Schema = {"minItems": 1, "items": {"type": "object", **ITEM}}
