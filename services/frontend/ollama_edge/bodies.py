"""JSON bodies: the fields that do something. Others are sorted out by `refuse_unknown`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.frontend.http import ranges
from services.frontend.http.known_fields import described
from services.frontend.http.unknown_fields import UnknownFields
from shared.errors import Unimplemented

# How a machine is to hold the model, which is settled here when a cluster starts.
IGNORED = frozenset({"keep_alive"})
NOT_OFFERED = frozenset({
    "context", "height", "images", "shift", "steps", "suffix", "system_one", "template", "truncate", "width",
})  # fmt: skip
ROLES = ("system", "user", "assistant", "tool")
NOTHING: tuple[Any, ...] = (None, False, 0, "", [])  # what does not ask for it
IGNORED_OPTIONS = frozenset({
    "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep",
    "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
})  # fmt: skip
# By name: the value with which it does nothing. Any other asks for what is not offered.
HARMLESS_OPTIONS: Mapping[str, Any] = {
    "mirostat": 0,
    "mirostat_eta": None,
    "mirostat_tau": None,
    "penalize_newline": None,
    "repeat_last_n": -1,
    "tfs_z": 1,
    "typical_p": 1,
}


class Options(BaseModel):
    """How to choose tokens; what is left out is the model's own recommendation."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra=described(IGNORED_OPTIONS, {name: (None, value) for name, value in HARMLESS_OPTIONS.items()}),
    )

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = Field(default=None, description="tokens at most; -1 and -2: as many as fit")
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def refuse_unknown(self, unknown: UnknownFields) -> None:
        """Raises InvalidArgument for a misspelt option, and Unimplemented for one that is not offered."""
        extra, known = self.model_extra or {}, IGNORED_OPTIONS | HARMLESS_OPTIONS.keys()
        unknown.check(extra.keys() - known, type(self).model_fields.keys() | known, "options.")
        for name, value in extra.items():
            if name in HARMLESS_OPTIONS and value not in (None, HARMLESS_OPTIONS[name]):
                raise Unimplemented(f"options.{name} is not offered by this server", field=f"options.{name}")


class OllamaBody(BaseModel):
    """Any body."""

    model_config = ConfigDict(extra="allow", json_schema_extra=described(IGNORED, dict.fromkeys(NOT_OFFERED, NOTHING)))

    model: str = Field("", description="with or without :latest; empty: the only one")
    options: Options | None = None

    @property
    def called(self) -> str:
        return self.model.removesuffix(":latest")

    @property
    def chosen(self) -> Options:
        return self.options or Options()

    def refuse_unknown(self, unknown: UnknownFields) -> None:
        """Raises InvalidArgument for a misspelt field, which would otherwise be a silent default."""
        self.chosen.refuse_unknown(unknown)
        extra, known = self.model_extra or {}, IGNORED | NOT_OFFERED
        unknown.check(extra.keys() - known, type(self).model_fields.keys() | known)
        for name, value in extra.items():
            if name in NOT_OFFERED and value not in NOTHING:
                raise Unimplemented(f"{name} is not offered by this server", field=name)


WITHOUT_TEMPLATE = {
    "not": {
        "required": ["raw", "system", "prompt"],
        "properties": {"raw": {"const": True}, "system": {"minLength": 1}, "prompt": {"minLength": 1}},
    }
}


class AnswerBody(OllamaBody):
    """What chats and generations share."""

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json, or a JSON Schema")
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)


class OllamaChatBody(AnswerBody):
    """POST /api/chat"""

    messages: list[dict[str, Any]] = Field(
        [],
        json_schema_extra={
            "items": {"type": "object", "required": ["role"], "properties": {"role": {"enum": [*ROLES]}}},
        },
    )
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(AnswerBody):
    """POST /api/generate"""

    model_config = ConfigDict(
        json_schema_extra=described(IGNORED, dict.fromkeys(NOT_OFFERED, NOTHING), [WITHOUT_TEMPLATE])
    )

    prompt: str = ""
    system: str = ""
    raw: bool = Field(default=False, description="the prompt is taken as it is, without a template")


class EmbedBody(OllamaBody):
    """POST /api/embed"""

    input: str | list[str] = Field(json_schema_extra=ranges.TEXT_TO_READ)
    truncate: bool = True
    dimensions: int | None = Field(None, json_schema_extra={"minimum": 1})


class EmbeddingsBody(OllamaBody):
    """POST /api/embeddings, which is older"""

    prompt: str = Field(json_schema_extra=ranges.TEXT_TO_READ)


class ShowBody(OllamaBody):
    """POST /api/show"""

    verbose: bool | None = Field(None, description="accepted; nothing is left out")
