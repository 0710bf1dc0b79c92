"""Request body of POST /v1/responses with the supported fields; `refuse_unknown` handles the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire.services.frontend.bounds.bodies.extra_body import merge_extra_body
from quire.services.frontend.http.fields.known_fields import body_schema_extra
from quire.services.frontend.http.fields.model_field import ModelField
from quire.services.frontend.http.fields.nested_fields import check_objects
from quire.services.frontend.http.fields.optional_fields import Flag
from quire.services.frontend.http.fields.ranges import needs
from quire.services.frontend.http.fields.scalar_fields import ScalarFields
from quire.services.frontend.http.fields.unknown_fields import UnknownFields
from quire.services.frontend.input_processor.sampling.unsupported_samplers import UNSUPPORTED_SAMPLERS
from quire.services.frontend.openai_edge.body.field_schemas import CUSTOM, FUNCTION, TEXT_FORMAT
from quire.services.frontend.openai_edge.body.structured_outputs import StructuredOutputsBody
from quire.services.frontend.openai_edge.body.thinking import ReasoningEffort, ThinkingField
from quire.services.frontend.openai_edge.responses.item_schemas import INPUT
from quire.services.frontend.openai_edge.responses.objects import FORMAT, OBJECTS
from quire.shared.errors import InvalidArgument, Unimplemented

# Fields without influence on the text: bookkeeping, and hints that cannot be followed here.
IGNORED = frozenset({
    "access_programs", "background_options", "client_metadata", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier", "service_tier", "stream_options", "user",
})  # fmt: skip
NOTHING: tuple[Any, ...] = (None, False, 0, [], {})  # values that do not request the feature
DOCUMENTED: Mapping[str, Sequence[Any]] = dict.fromkeys(
    ("context_management", "conversation", "image", "moderation", "previous_input_messages", "prompt"), NOTHING
)
NOT_OFFERED: Mapping[str, Sequence[Any]] = {**UNSUPPORTED_SAMPLERS, **DOCUMENTED}
LOGPROBS = "message.output_text.logprobs"
# Only logprobs have an effect: reasoning is always included unencrypted, and there are no searches, programs or
# pictures to include.
INCLUDABLE = (
    LOGPROBS, "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip


CALLABLE: dict[str, Any] = {
    **FUNCTION,
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, **FUNCTION["properties"]},
}
GRAMMAR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "syntax", "definition"],
    "properties": {
        "type": {"const": "grammar"},
        "syntax": {"enum": ["lark", "regex"]},
        "definition": {"type": "string", "minLength": 1},
    },
}
TOOLS: dict[str, Any] = {
    "items": {
        "anyOf": [
            CALLABLE,
            {
                **CUSTOM,
                "required": ["type", "name"],
                "properties": {
                    **CUSTOM["properties"],
                    "type": {"const": "custom"},
                    "format": {"anyOf": [TEXT_FORMAT, GRAMMAR, {"type": "null"}]},
                },
            },
            {
                "type": "object",
                "required": ["type", "name", "tools"],
                "properties": {
                    "type": {"const": "namespace"},
                    "name": {"type": "string", "minLength": 1},
                    "tools": {"type": "array", "items": {"type": "object", "required": ["type"]}},
                },
            },
            {
                "type": "object",
                "required": ["type"],
                "properties": {
                    "type": {"not": {"enum": ["custom", "function", "namespace"]}, "type": "string", "minLength": 1}
                },
                "description": "tools that this server does not run are not shown to the model",
            },
        ]
    }
}


NAMED: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string", "minLength": 1}},
}
TOOL_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"enum": [None, "none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": {"enum": ["custom", "function"]}, "name": {"type": "string", "minLength": 1}},
        },
        {
            "type": "object",
            "required": ["type", "mode", "tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": NAMED, "minItems": 1},
            },
        },
    ],
}
RULES = (
    needs("tool_choice", {"not": {"enum": [None, "none", "auto"]}}, "tools", {"type": "array", "minItems": 1}),
    {
        "not": {
            "required": ["background", "store"],
            "properties": {"background": {"const": True}, "store": {"const": False}},
        }
    },
)


class ReasoningBody(BaseModel):
    """Reasoning options; summaries are not made, the reasoning itself is returned."""

    model_config = ConfigDict(extra="allow")

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextBody(BaseModel):
    """Options of the text, such as its format."""

    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(ScalarFields):
    """Request body of POST /v1/responses."""

    model_config = ConfigDict(extra="allow", json_schema_extra=body_schema_extra(IGNORED, DOCUMENTED, RULES))

    ignored_fields = IGNORED
    not_offered = NOT_OFFERED
    objects = OBJECTS

    model: ModelField = ""
    input: str | list[dict[str, Any]] = Field(json_schema_extra=INPUT)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = Field(
        False,
        description="run without the client; GET /v1/responses/{id} returns its state, with ?stream=true its events",
    )
    max_output_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: Flag = False
    min_tokens: int | None = None
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    logit_bias: dict[str, float] | None = None
    logits_processors: dict[str, dict[str, Any] | None] | None = None
    structured_outputs: StructuredOutputsBody | None = None
    top_logprobs: int | None = None
    include: list[str] | None = Field(None, json_schema_extra={"items": {"enum": [*INCLUDABLE]}})
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    tools: list[dict[str, Any]] | None = Field(None, json_schema_extra=TOOLS)
    tool_choice: Any = Field(None, json_schema_extra=TOOL_CHOICE)
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(
        None, description="limit for built-in tools, of which this server has none", json_schema_extra={"minimum": 1}
    )
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    enable_thinking: bool | None = Field(None, description="the chat template's variable")
    thinking: ThinkingField | None = Field(None, description="on or off")
    request_id: str | None = None
    priority: int | None = None
    tenant: str | None = None
    cache_salt: str | None = Field(None, min_length=1)
    kv_priority: Literal["low", "normal", "high"] = "normal"

    @model_validator(mode="before")
    @classmethod
    def _open_extra_body(cls, sent: Any) -> Any:
        return merge_extra_body(sent)

    def check_rules(self, unknown: UnknownFields) -> None:
        """Raises Unimplemented for an unknown `include`, InvalidArgument for background without store and
        max_tool_calls below 1; unknown fields of the text format are handled as `unknown` decides."""
        check_objects(unknown, self.text and self.text.format, FORMAT, "text.format")
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise Unimplemented(f"include: {name!r} is not supported by this server", field="include")
        if self.background and self.store is False:
            raise InvalidArgument("background requires store=true, since its client retrieves it later", field="store")
        if self.max_tool_calls is not None and self.max_tool_calls < 1:
            raise InvalidArgument(
                f"max_tool_calls must be at least 1, got {self.max_tool_calls}", field="max_tool_calls"
            )

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())
