"""Request bodies with the supported fields; `refuse_unknown` handles the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire.services.frontend.anthropic_edge.block_schemas import ROLE_RULES, SYSTEM
from quire.services.frontend.anthropic_edge.objects import BLOCK, CHOICE, TOOL_FIELDS
from quire.services.frontend.anthropic_edge.tools import MODES
from quire.services.frontend.anthropic_edge.typed_tools import RUN_BY_CLIENT, RUN_BY_SERVER
from quire.services.frontend.bounds.bodies.extra_body import merge_extra_body
from quire.services.frontend.http.fields.checked_body import CheckedBody
from quire.services.frontend.http.fields.known_fields import body_schema_extra
from quire.services.frontend.http.fields.nested_fields import Shape, check_objects
from quire.services.frontend.http.fields.optional_fields import Flag, OptionalText
from quire.services.frontend.http.fields.ranges import needs
from quire.services.frontend.http.fields.unknown_fields import UnknownFields
from quire.services.frontend.input_processor.sampling.unsupported_samplers import UNSUPPORTED_SAMPLERS

# Fields without influence on the text: bookkeeping, and cache control, which is not needed here.
IGNORED = frozenset({
    "anthropic_beta", "betas", "cache_control", "context_management",
    "diagnostics", "inference_geo", "metadata", "service_tier", "speed",
    "user_profile_id", "workspace_id",
})  # fmt: skip
# By name, the values that do not request the feature.
NOT_OFFERED: Mapping[str, Sequence[Any]] = dict.fromkeys(
    ("compaction", "container", "fallbacks", "mcp_servers", "thread"), (None, [], {})
)
THREAD = "thread_unsupported_request"  # on this code, Anthropic's clients send the whole conversation instead


TOOL_CHOICE: dict[str, Any] = {
    "required": ["type"],
    "properties": {"type": {"enum": [*MODES]}},
    **needs("type", {"const": "tool"}, "name", {"type": "string", "minLength": 1}),
}
MUST_CALL = needs(
    "tool_choice",
    {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["any", "tool"]}}},
    "tools",
    {"type": "array", "minItems": 1},
)
TOOL: dict[str, Any] = {
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "type": {
            "anyOf": [
                {"enum": [None, "custom", *RUN_BY_CLIENT]},
                {"type": "string", "pattern": f"^({'|'.join(RUN_BY_SERVER)})"},
            ]
        },
        "input_schema": {"type": ["object", "null"]},
        "description": {"type": ["string", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}


class MessageBody(BaseModel):
    """Message of one conversation turn."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"allOf": [*ROLE_RULES]})

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Thinking(BaseModel):
    """Amount of reasoning: a budget in tokens, or as much as the model chooses."""

    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = Field(
        None, description="omitted: the answer has no reasoning; any other value: the whole reasoning"
    )


class OutputConfig(BaseModel):
    """Effort, and the format of the answer."""

    model_config = ConfigDict(extra="allow")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountBody(CheckedBody):
    """Request body of POST /v1/messages/count_tokens."""

    model_config = ConfigDict(extra="allow", json_schema_extra=body_schema_extra(IGNORED, NOT_OFFERED, [MUST_CALL]))

    ignored_fields = IGNORED
    not_offered = UNSUPPORTED_SAMPLERS
    unavailable = NOT_OFFERED
    reasons: ClassVar[Mapping[str, str]] = {"thread": THREAD}
    objects: ClassVar[Mapping[str, Shape]] = {"system": BLOCK, "tools": TOOL_FIELDS, "tool_choice": CHOICE}

    model: OptionalText = ""
    messages: list[MessageBody] = Field(json_schema_extra={"minItems": 1})
    system: str | list[dict[str, Any]] | None = Field(None, json_schema_extra=SYSTEM)
    tools: list[dict[str, Any]] | None = Field(None, json_schema_extra={"items": TOOL})
    tool_choice: dict[str, Any] | None = Field(None, json_schema_extra=TOOL_CHOICE)
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = Field(None, description="legacy name of output_config.format")
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _open_extra_body(cls, sent: Any) -> Any:
        return merge_extra_body(sent)

    @classmethod
    def known_fields(cls) -> Collection[str]:
        return MessagesBody.model_fields.keys()

    def check_rules(self, unknown: UnknownFields) -> None:
        for number, message in enumerate(self.messages):
            check_objects(unknown, message.content, BLOCK, f"messages[{number}].content")


class MessagesBody(CountBody):
    """Request body of POST /v1/messages."""

    max_tokens: int = Field(json_schema_extra={"minimum": 1})
    stop_sequences: list[str] | None = None
    stream: Flag = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
