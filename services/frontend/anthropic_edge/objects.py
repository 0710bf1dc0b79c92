"""Shapes of the objects in the bodies of /v1/messages, by the fields of Anthropic's API."""

from __future__ import annotations

from quire.services.frontend.anthropic_edge.block_schemas import SERVER_RUN
from quire.services.frontend.http.fields.nested_fields import Shape

PART = Shape(
    frozenset({
        "type", "text", "citations", "cache_control", "tool_name", "source", "title", "context", "content",
    })
)  # fmt: skip
BLOCK = Shape(
    frozenset({
        "type", "text", "citations", "cache_control", "id", "name", "input", "caller", "tool_use_id", "content",
        "is_error", "thinking", "signature", "data", "source", "title", "context",
    }),
    {"content": PART},
    opaque=frozenset(SERVER_RUN),
)  # fmt: skip
TOOL_FIELDS = Shape(
    frozenset({
        "name", "description", "input_schema", "type", "strict", "cache_control", "defer_loading", "allowed_callers",
        "input_examples", "eager_input_streaming", "max_characters", "max_uses", "allowed_domains", "blocked_domains",
        "user_location", "max_content_tokens", "citations", "use_cache", "mcp_server_name", "default_config", "configs",
        "display_width_px", "display_height_px", "display_number", "enable_zoom", "model", "caching", "max_tokens",
    })
)  # fmt: skip
CHOICE = Shape(frozenset({"type", "name", "disable_parallel_tool_use"}))
