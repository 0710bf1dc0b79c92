"""Shapes of the objects in the body of /v1/responses, by the fields of OpenAI's API or those read here."""

from __future__ import annotations

from collections.abc import Mapping

from quire.services.frontend.http.fields.nested_fields import Shape
from quire.services.frontend.openai_edge.responses.item_schemas import FORMS, UNREADABLE

PART = Shape(
    frozenset({
        "type", "text", "annotations", "logprobs", "refusal", "image_url", "detail", "file_id", "file_data", "filename",
        "uuid", "file_url", "input_audio", "encrypted_content", "prompt_cache_breakpoint",
    })
)  # fmt: skip
ITEM = Shape(
    frozenset({
        "type", "role", "content", "id", "status", "phase", "call_id", "name", "namespace", "arguments", "output",
        "input", "action", "operation", "summary", "encrypted_content", "caller", "created_by", "end_turn", "author",
        "recipient", "tools", "max_output_length", "environment",
    }),
    {"content": PART, "output": PART, "summary": PART},
    opaque=frozenset((*UNREADABLE, *(f"{kind}_output" for kind in FORMS))),
)  # fmt: skip
FUNCTION = Shape(
    frozenset({
        "type", "name", "description", "parameters", "strict", "defer_loading", "output_schema", "allowed_callers",
        "format",
    })
)  # fmt: skip
TOOL = Shape(
    FUNCTION.fields | {"tools"},
    {"tools": FUNCTION},
    opaque=frozenset({
        "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
        "image_generation", "local_shell", "mcp", "shell", "tool_search", "web_search", "web_search_2025_08_26",
        "web_search_preview", "web_search_preview_2025_03_11",
    }),
)  # fmt: skip
FORMAT = Shape(
    frozenset({
        "type", "name", "description", "schema", "strict", "json_schema", "format", "structures", "triggers",
    })
)  # fmt: skip
OBJECTS: Mapping[str, Shape] = {"input": ITEM, "tools": TOOL}
