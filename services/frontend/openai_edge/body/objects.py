"""Shapes of the objects in the bodies of chat completions, by the fields of OpenAI's API or those read here."""

from __future__ import annotations

from quire.services.frontend.http.fields.nested_fields import Shape

CALLED = Shape(frozenset({"name", "arguments"}))
CALL = Shape(
    frozenset({"id", "type", "index", "function", "custom"}),
    {"function": CALLED, "custom": Shape(frozenset({"name", "input"}))},
)
PART = Shape(
    frozenset({
        "type", "text", "refusal", "image_url", "video_url", "audio_url", "detail", "uuid", "file_id", "input_audio",
        "file", "annotations", "cache_control", "prompt_cache_breakpoint", "thinking", "reasoning", "signature",
        "closed",
    }),
)  # fmt: skip
MESSAGE = Shape(
    frozenset({
        "role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "thinking",
        "refusal", "audio", "function_call", "annotations", "prefix", "partial", "cache_control",
    }),
    {"content": PART, "tool_calls": CALL},
)  # fmt: skip
FUNCTION = Shape(frozenset({"name", "description", "parameters", "strict", "cache_control"}))
GRAMMAR = Shape(frozenset({"syntax", "definition"}))
CUSTOM = Shape(
    frozenset({"name", "description", "format", "cache_control"}),
    {"format": Shape(frozenset({"type", "grammar"}), {"grammar": GRAMMAR})},
)
TOOL = Shape(frozenset({"type", "function", "custom", "cache_control"}), {"function": FUNCTION, "custom": CUSTOM})
ALLOWED = Shape(frozenset({"mode", "tools"}), {"tools": TOOL})
TOOL_CHOICES = Shape(
    frozenset({"type", "function", "custom", "allowed_tools"}),
    {"function": FUNCTION, "custom": CUSTOM, "allowed_tools": ALLOWED},
)
