"""Schemas for the OpenAPI document of values that are validated elsewhere, with more detailed errors."""

from __future__ import annotations

from quire.services.frontend.http.fields.ranges import Schema, needs

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

NOT_EMPTY: Schema = {"minItems": 1}
MESSAGES: Schema = {
    "minItems": 1,
    "items": {"type": "object", "required": ["role"], "properties": {"role": {"enum": [*ROLES]}}},
}
FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "parameters": {"type": ["object", "null"]},
        "description": {"type": ["string", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
TEXT_FORMAT: Schema = {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}}
GRAMMAR: Schema = {
    "type": "object",
    "required": ["syntax", "definition"],
    "properties": {"syntax": {"enum": ["lark", "regex"]}, "definition": {"type": "string", "minLength": 1}},
}
GRAMMAR_FORMAT: Schema = {
    "type": "object",
    "required": ["type", "grammar"],
    "properties": {"type": {"const": "grammar"}, "grammar": GRAMMAR},
}
CUSTOM: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": {"type": ["string", "null"]},
        "format": {"anyOf": [TEXT_FORMAT, GRAMMAR_FORMAT, {"type": "null"}]},
    },
}
CALLED: Schema = {
    "type": "object",
    "anyOf": [
        {"required": ["function"], "properties": {"type": {"const": "function"}, "function": FUNCTION}},
        {"required": ["type", "custom"], "properties": {"type": {"const": "custom"}, "custom": CUSTOM}},
    ],
}
TOOLS: Schema = {"items": CALLED}
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": [None, "none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {"type": {"const": "function"}, "function": FUNCTION},
        },
        {
            "type": "object",
            "required": ["type", "custom"],
            "properties": {"type": {"const": "custom"}, "custom": CUSTOM},
        },
        {
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["mode", "tools"],
                    "properties": {
                        "mode": {"enum": ["auto", "required"]},
                        "tools": {"type": "array", "items": CALLED, **NOT_EMPTY},
                    },
                },
            },
        },
    ],
}
TOKEN: Schema = {"type": "integer", "minimum": 0}
TEXT: Schema = {"type": "string", "minLength": 1}
NOT_NULL: Schema = {"not": {"type": "null"}}
IS_TRUE: Schema = {"const": True}
GENERATION_RULES = (
    needs("stream_options", NOT_NULL, "stream", IS_TRUE),
    needs("retention_s", NOT_NULL, "resumable", IS_TRUE),
    needs("resumable", IS_TRUE, "stream", IS_TRUE),
)
CHAT_RULES = (
    *GENERATION_RULES,
    needs("top_logprobs", NOT_NULL, "logprobs", IS_TRUE),
    needs("tool_choice", {"not": {"enum": [None, "none", "auto"]}}, "tools", {"type": "array", **NOT_EMPTY}),
)
# Restrictions for a batch of conversations.
BATCH_RULES = {
    "properties": {
        "n": {"enum": [None, 1]},
        "prompt_logprob_token_ids": {"enum": [None, []]},
        "prompt_logprobs": {"enum": [None, 0]},
        "resumable": {"const": False},
        "stream": {"enum": [None, False]},
        "tools": {"type": "null"},
        "use_beam_search": {"const": False},
    }
}
PROMPT: Schema = {
    "description": "text, token ids, or a list of either",
    "anyOf": [
        TEXT,
        {"type": "array", "items": TOKEN, **NOT_EMPTY},
        {"type": "array", "items": TEXT, **NOT_EMPTY},
        {"type": "array", "items": {"type": "array", "items": TOKEN, **NOT_EMPTY}, **NOT_EMPTY},
    ],
}
