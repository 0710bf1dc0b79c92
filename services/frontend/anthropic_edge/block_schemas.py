"""Schemas of a conversation's blocks for the OpenAPI document; messages.py reads the blocks."""

from __future__ import annotations

from quire.services.frontend.http.fields.ranges import Schema, needs

THOUGHTS = ("thinking", "redacted_thinking")
# Calls of tools that Anthropic's servers ran, and their results: parts of turns that another server answered.
SERVER_RUN = (
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
    "mcp_tool_use", "mcp_tool_result", "advisor_tool_result", "container_upload",
)  # fmt: skip

TEXT: Schema = {"required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
REFERENCE: Schema = {
    "required": ["type", "tool_name"],
    "properties": {"type": {"const": "tool_reference"}, "tool_name": {"type": "string"}},
}
SOURCE: Schema = {
    "type": "object",
    "anyOf": [
        {"required": ["type", "data"], "properties": {"type": {"const": "text"}, "data": {"type": "string"}}},
        {"required": ["type", "content"], "properties": {"type": {"const": "content"}, "content": {"type": "string"}}},
    ],
}
DOCUMENT: Schema = {
    "required": ["type", "source"],
    "properties": {"type": {"const": "document"}, "source": SOURCE},
}
SEARCHED: Schema = {
    "required": ["type", "content"],
    "properties": {
        "type": {"const": "search_result"},
        "content": {"type": "array", "items": {"type": "object", **TEXT}},
    },
}
COMPACTION: Schema = {
    "required": ["type"],
    "properties": {"type": {"const": "compaction"}, "content": {"type": ["string", "null"]}},
}
IMAGE: Schema = {
    "required": ["type", "source"],
    "properties": {
        "type": {"const": "image"},
        "source": {
            "type": "object",
            "anyOf": [
                {"required": ["type", "data"], "properties": {"type": {"const": "base64"}, "data": {"type": "string"}}},
                {"required": ["type", "url"], "properties": {"type": {"const": "url"}, "url": {"type": "string"}}},
            ],
        },
    },
}
RESULT: Schema = {
    "required": ["type"],
    "properties": {
        "type": {"const": "tool_result"},
        "content": {
            "type": ["string", "array", "null"],
            "items": {"type": "object", "anyOf": [TEXT, REFERENCE, DOCUMENT, SEARCHED, IMAGE]},
        },
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
SERVERS: Schema = {"required": ["type"], "properties": {"type": {"enum": [*SERVER_RUN]}}}
SYSTEM: Schema = {"items": {"type": "object", **TEXT}}
BLOCKS = {
    "user": (TEXT, RESULT, DOCUMENT, SEARCHED, IMAGE),
    "assistant": (TEXT, USE, THOUGHT, SERVERS, COMPACTION),
    "system": (TEXT,),
}  # by the role of their message
ROLE_RULES = [
    needs("role", {"const": role}, "content", {"items": {"anyOf": [*blocks]}}) for role, blocks in BLOCKS.items()
]
