"""Objects inside the bodies of chat completions, by the fields that OpenAI's API gives them or that are read here."""

from __future__ import annotations

from quire.services.frontend.http.fields.nested_fields import Shape

CALLED = Shape(frozenset({"name", "arguments"}))
CALL = Shape(frozenset({"id", "type", "index", "function", "custom"}), {"function": CALLED})
PART = Shape(
    frozenset({
        "type", "text", "refusal", "image_url", "input_audio", "file", "annotations", "cache_control",
        "prompt_cache_breakpoint", "thinking", "reasoning", "signature", "closed",
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
TOOL = Shape(frozenset({"type", "function", "custom", "cache_control"}), {"function": FUNCTION})
ALLOWED = Shape(frozenset({"mode", "tools"}), {"tools": TOOL})
TOOL_CHOICES = Shape(
    frozenset({"type", "function", "custom", "allowed_tools"}), {"function": FUNCTION, "allowed_tools": ALLOWED}
)
