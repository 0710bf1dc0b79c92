"""JSON bodies with the fields that have an effect; `refuse_unknown` handles all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from quire.services.frontend.http.fields import ranges
from quire.services.frontend.http.fields.checked_body import CheckedBody
from quire.services.frontend.http.fields.known_fields import body_schema_extra
from quire.services.frontend.http.fields.nested_fields import Shape
from quire.services.frontend.http.fields.optional_fields import Flag, OptionalText
from quire.services.frontend.http.fields.scalar_fields import OllamaScalarFields
from quire.services.frontend.input_processor.sampling.unsupported_samplers import UNSUPPORTED_SAMPLERS
from quire.services.frontend.request.scalar_parameters import BY_NAME

# How the model is kept in memory, which a cluster's settings decide.
IGNORED = frozenset({"keep_alive"})
ROLES = ("system", "user", "assistant", "tool")
NOTHING: tuple[Any, ...] = (None, False, 0, "", [])  # values that do not ask for a feature
NOT_OFFERED: Mapping[str, Sequence[Any]] = dict.fromkeys((
    "context", "height", "shift", "steps", "suffix", "system_one", "template", "truncate", "width",
), NOTHING)  # fmt: skip
IGNORED_OPTIONS = frozenset({
    "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep",
    "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
})  # fmt: skip
CALL = Shape(frozenset({"id", "type", "function"}), {"function": Shape(frozenset({"name", "arguments", "index"}))})
MESSAGE = Shape(
    frozenset({"role", "content", "images", "videos", "tool_calls", "thinking", "tool_name", "tool_call_id"}),
    {"tool_calls": CALL},
)
TOOL = Shape(
    frozenset({"type", "function", "items"}),
    {"function": Shape(frozenset({"name", "description", "parameters", "strict"}))},
)
OPTION_NAMES = {"repetition_penalty": "repeat_penalty"}  # sampling parameter -> its name in Ollama's API
# Option name -> values without effect. Other values ask for an unsupported feature.
HARMLESS_OPTIONS: Mapping[str, Sequence[Any]] = {**UNSUPPORTED_SAMPLERS, "penalize_newline": (None, True)}


class Options(OllamaScalarFields):
    """Sampling options in Ollama's names; omitted ones use the model's recommendation."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra=body_schema_extra(IGNORED_OPTIONS, HARMLESS_OPTIONS),
    )

    ignored_fields = IGNORED_OPTIONS
    not_offered = HARMLESS_OPTIONS

    temperature: float | None = None
    seed: int | None = None
    num_predict: int | None = Field(
        default=None, description="maximum number of tokens; -1 and -2: up to the context length"
    )
    stop: str | list[str] | None = None
    repeat_penalty: float | None = Field(default=None, json_schema_extra=dict(BY_NAME["repetition_penalty"].schema))


class OllamaBody(CheckedBody):
    """Common fields of the bodies of all paths."""

    model_config = ConfigDict(extra="allow", json_schema_extra=body_schema_extra(IGNORED, NOT_OFFERED))

    ignored_fields = IGNORED
    unavailable = NOT_OFFERED

    model: OptionalText = Field("", description="model name, with or without :latest; empty: the served model")
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
    """Common fields of the bodies of /api/chat and /api/generate."""

    stream: Flag = True
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json, or a JSON Schema")
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)


class OllamaChatBody(AnswerBody):
    """Body of POST /api/chat."""

    objects: ClassVar[Mapping[str, Shape]] = {"messages": MESSAGE, "tools": TOOL}

    messages: list[dict[str, Any]] = Field(
        [],
        json_schema_extra={
            "items": {"type": "object", "required": ["role"], "properties": {"role": {"enum": [*ROLES]}}},
        },
    )
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(AnswerBody):
    """Body of POST /api/generate."""

    model_config = ConfigDict(json_schema_extra=body_schema_extra(IGNORED, NOT_OFFERED, [WITHOUT_TEMPLATE]))

    prompt: OptionalText = ""
    system: OptionalText = ""
    images: list[str] | None = Field(None, description="pictures in base64")
    videos: list[str] | None = Field(None, description="videos in base64, for models that take them")
    raw: Flag = Field(default=False, description="use the prompt without the chat template")


class EmbedBody(OllamaBody):
    """Body of POST /api/embed."""

    input: str | list[str] = Field(json_schema_extra=ranges.TEXT_TO_READ)
    truncate: Flag = True
    dimensions: int | None = Field(None, json_schema_extra={"minimum": 1})


class EmbeddingsBody(OllamaBody):
    """Body of POST /api/embeddings, the predecessor of /api/embed."""

    prompt: str = Field(json_schema_extra=ranges.TEXT_TO_READ)


class ShowBody(OllamaBody):
    """Body of POST /api/show."""

    verbose: bool | None = Field(None, description="accepted; the answer is always complete")
