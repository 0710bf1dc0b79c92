"""JSON bodies: the fields that do something. Others are sorted out by `refuse_unknown`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from quire.services.frontend.http.fields import ranges
from quire.services.frontend.http.fields.checked_body import CheckedBody
from quire.services.frontend.http.fields.known_fields import body_schema_extra
from quire.services.frontend.http.fields.nested_fields import Shape
from quire.services.frontend.http.fields.optional_fields import Flag, OptionalText
from quire.services.frontend.input_processor.sampling.unsupported_samplers import UNSUPPORTED_SAMPLERS
from quire.services.frontend.request.scalar_parameters import BY_NAME

# How a machine is to hold the model, which is settled here when a cluster starts.
IGNORED = frozenset({"keep_alive"})
ROLES = ("system", "user", "assistant", "tool")
NOTHING: tuple[Any, ...] = (None, False, 0, "", [])  # what does not ask for it
NOT_OFFERED: Mapping[str, Sequence[Any]] = dict.fromkeys((
    "context", "height", "images", "shift", "steps", "suffix", "system_one", "template", "truncate", "width",
), NOTHING)  # fmt: skip
IGNORED_OPTIONS = frozenset({
    "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep",
    "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
})  # fmt: skip
CALL = Shape(frozenset({"id", "type", "function"}), {"function": Shape(frozenset({"name", "arguments", "index"}))})
MESSAGE = Shape(
    frozenset({"role", "content", "images", "tool_calls", "thinking", "tool_name", "tool_call_id"}),
    {"tool_calls": CALL},
)
TOOL = Shape(
    frozenset({"type", "function", "items"}),
    {"function": Shape(frozenset({"name", "description", "parameters", "strict"}))},
)
OPTION_NAMES = {"repetition_penalty": "repeat_penalty"}  # sampling parameters that have another name here
# By name: the values with which it does nothing. Any other asks for what is not offered.
HARMLESS_OPTIONS: Mapping[str, Sequence[Any]] = {**UNSUPPORTED_SAMPLERS, "penalize_newline": (None, True)}


class Options(CheckedBody):
    """How to choose tokens; what is left out is the model's own recommendation."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra=body_schema_extra(IGNORED_OPTIONS, HARMLESS_OPTIONS),
    )

    ignored_fields = IGNORED_OPTIONS
    not_offered = HARMLESS_OPTIONS

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = Field(default=None, description="tokens at most; -1 and -2: as many as fit")
    stop: str | list[str] | None = None
    repeat_penalty: float | None = Field(default=None, json_schema_extra=dict(BY_NAME["repetition_penalty"].schema))
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaBody(CheckedBody):
    """Any body."""

    model_config = ConfigDict(extra="allow", json_schema_extra=body_schema_extra(IGNORED, NOT_OFFERED))

    ignored_fields = IGNORED
    unavailable = NOT_OFFERED

    model: OptionalText = Field("", description="with or without :latest; empty: the only one")
    options: Options | None = None

    @property
    def model_name(self) -> str:
        return self.model.removesuffix(":latest")

    @property
    def given_options(self) -> Options:
        return self.options or Options()


WITHOUT_TEMPLATE = {
    "not": {
        "required": ["raw", "system", "prompt"],
        "properties": {"raw": {"const": True}, "system": {"minLength": 1}, "prompt": {"minLength": 1}},
    }
}


class AnswerBody(OllamaBody):
    """What chats and generations share."""

    stream: Flag = True
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json, or a JSON Schema")
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)


class OllamaChatBody(AnswerBody):
    """POST /api/chat"""

    objects: ClassVar[Mapping[str, Shape]] = {"messages": MESSAGE, "tools": TOOL}

    messages: list[dict[str, Any]] = Field(
        [],
        json_schema_extra={
            "items": {"type": "object", "required": ["role"], "properties": {"role": {"enum": [*ROLES]}}},
        },
    )
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(AnswerBody):
    """POST /api/generate"""

    model_config = ConfigDict(json_schema_extra=body_schema_extra(IGNORED, NOT_OFFERED, [WITHOUT_TEMPLATE]))

    prompt: OptionalText = ""
    system: OptionalText = ""
    raw: Flag = Field(default=False, description="the prompt is taken as it is, without a template")


class EmbedBody(OllamaBody):
    """POST /api/embed"""

    input: str | list[str] = Field(json_schema_extra=ranges.TEXT_TO_READ)
    truncate: Flag = True
    dimensions: int | None = Field(None, json_schema_extra={"minimum": 1})


class EmbeddingsBody(OllamaBody):
    """POST /api/embeddings, which is older"""

    prompt: str = Field(json_schema_extra=ranges.TEXT_TO_READ)


class ShowBody(OllamaBody):
    """POST /api/show"""

    verbose: bool | None = Field(None, description="accepted; nothing is left out")
