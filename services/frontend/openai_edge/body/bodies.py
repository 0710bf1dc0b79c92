"""Request bodies of the calls with the supported fields; `refuse_unknown` handles the others."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from quire.services.frontend.bounds.bodies.extra_body import merge_extra_body
from quire.services.frontend.http.fields.checked_body import CheckedBody
from quire.services.frontend.http.fields.known_fields import body_schema_extra
from quire.services.frontend.http.fields.model_field import ModelField
from quire.services.frontend.http.fields.nested_fields import Shape
from quire.services.frontend.http.fields.optional_fields import Flag
from quire.services.frontend.http.fields.ranges import exactly_one, given
from quire.services.frontend.http.fields.scalar_fields import ScalarFields
from quire.services.frontend.input_processor.pooling.pooling import POOLERS
from quire.services.frontend.input_processor.sampling.unsupported_fields import NO_OP_VALUES
from quire.services.frontend.input_processor.sampling.unsupported_samplers import UNSUPPORTED_SAMPLERS
from quire.services.frontend.openai_edge.body.field_schemas import (
    BATCH_RULES,
    CHAT_RULES,
    GENERATION_RULES,
    MESSAGES,
    NOT_EMPTY,
    PROMPT,
    TOOL_CHOICE,
    TOOLS,
)
from quire.services.frontend.openai_edge.body.objects import MESSAGE, TOOL, TOOL_CHOICES
from quire.services.frontend.openai_edge.body.scored_inputs import ScoredInputField, ScoredInputsField
from quire.services.frontend.openai_edge.body.structured_outputs import ResponseFormat, StructuredOutputsBody
from quire.services.frontend.openai_edge.body.thinking import ReasoningEffort, ReasoningField, ThinkingField
from quire.shared.errors import InvalidArgument

# OpenAI's fields without influence on the text: bookkeeping, and hints that cannot be followed here.
IGNORED = frozenset({
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "session_id",
    "store",
    "user",
    "verbosity",
})  # fmt: skip

GENERATED: Mapping[str, Sequence[Any]] = {**NO_OP_VALUES, **UNSUPPORTED_SAMPLERS}

PromptField = Annotated[Any, WithJsonSchema(PROMPT)]


def _keep_packed_ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Keeps the packed ids of a large body (bounds/bodies/long_ids.py)."""
    return value if isinstance(value, array) else check(value)


class Body(CheckedBody):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="allow", json_schema_extra=body_schema_extra(IGNORED, NO_OP_VALUES))

    ignored_fields = IGNORED
    not_offered: ClassVar[Mapping[str, Sequence[Any]]] = NO_OP_VALUES

    model: ModelField = ""

    @model_validator(mode="before")
    @classmethod
    def _open_extra_body(cls, sent: Any) -> Any:
        return merge_extra_body(sent)


class StreamOptions(BaseModel):
    """Additional content of a stream."""

    model_config = ConfigDict(extra="allow")

    include_usage: Flag = Field(default=False, description="send a last chunk with the usage")
    continuous_usage_stats: Flag = Field(default=False, description="usage so far in every chunk")
    include_obfuscation: bool | None = Field(default=None, description="accepted for OpenAI's clients, without effect")


class RepetitionDetectionBody(BaseModel):
    """Stop condition for samples that repeat themselves: RepetitionDetection of sampling.proto."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: int = 0
    min_pattern_size: int = 1
    min_count: int = 0


class GenerationBody(Body, ScalarFields):
    """Fields of completions and chat completions; sampling fields are named as in sampling.proto."""

    not_offered: ClassVar[Mapping[str, Sequence[Any]]] = GENERATED

    n: int | None = None
    temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: Flag = False
    include_stop_str_in_output: Flag = False
    logit_bias: dict[str, float] | None = None
    logits_processors: dict[str, dict[str, Any] | None] | None = Field(
        None, description="name of a logits processor that all workers have -> its arguments"
    )
    allowed_token_ids: list[int] | None = Field(None, json_schema_extra=NOT_EMPTY)
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetectionBody | None = None
    use_beam_search: Flag = Field(default=False, description="the n most likely answers, found with n beams")
    length_penalty: float | None = None
    early_stopping: bool | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    thinking_token_budget: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    skip_special_tokens: Flag = True
    spaces_between_special_tokens: Flag = True
    skip_reading_prefix_cache: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(None, ge=1, description="tokens of a choice between its chunks")
    resumable: Flag = Field(
        default=False, description="continue without the client; GET /v1/streams/{request_id} resumes the stream"
    )
    retention_s: float | None = Field(
        None,
        description="with resumable: retention without a reader and after the end; default: the server's setting",
    )
    echo: bool | None = False
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = None
    priority: int | None = None
    tenant: str | None = None
    cache_salt: str | None = Field(None, min_length=1)
    kv_priority: Literal["low", "normal", "high"] = "normal"
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    return_metrics: bool | None = Field(None, description="include the times of this request; in a stream at its end")
    guided_json: str | dict[str, Any] | None = Field(None, description="vLLM's legacy name of structured_outputs.json")
    guided_regex: str | None = Field(None, description="... of structured_outputs.regex")
    guided_choice: list[str] | None = Field(None, description="... of structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="... of structured_outputs.grammar")


class CompletionBody(GenerationBody):
    """Request body of POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra=body_schema_extra(IGNORED, NO_OP_VALUES, GENERATION_RULES))

    prompt: PromptField
    best_of: int | None = Field(None, ge=1, description="samples to choose from; n, or left out")
    logprobs: int | None = None
    add_special_tokens: Flag = True


class ChatOptions(GenerationBody):
    """Fields of a chat completion except the messages."""

    model_config = ConfigDict(json_schema_extra=body_schema_extra(IGNORED, NO_OP_VALUES, CHAT_RULES))

    objects: ClassVar[Mapping[str, Shape]] = {"messages": MESSAGE, "tools": TOOL, "tool_choice": TOOL_CHOICES}

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    add_special_tokens: Flag = False
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_args: dict[str, Any] | None = Field(None, description="Baseten's name of chat_template_kwargs")
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = Field(None, description="the chat template's variable")
    thinking: ThinkingField | None = Field(None, description="on or off, and a budget in tokens")
    thinking_budget: int | None = Field(
        None, description="thinking_token_budget of models that reason, without effect on others"
    )
    reasoning: ReasoningField | None = Field(None, description="OpenRouter's name of reasoning_effort and thinking")
    think: bool | ReasoningEffort | None = Field(None, description="Ollama's name of enable_thinking")
    include_reasoning: Flag = True
    tools: list[dict[str, Any]] | None = Field(None, json_schema_extra=TOOLS)
    tool_choice: Any = Field(None, json_schema_extra=TOOL_CHOICE)
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = Field(None, description="options of the model's media processor")
    media_io_kwargs: dict[str, dict[str, Any]] | None = Field(
        None, description="by modality: image_mode and rgba_background_color of image; num_frames and fps of video"
    )


class ChatBody(ChatOptions):
    """Request body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(json_schema_extra=MESSAGES)


class ChatBatchBody(ChatOptions):
    """Request body of POST /v1/chat/completions/batch."""

    model_config = ConfigDict(json_schema_extra=body_schema_extra(IGNORED, NO_OP_VALUES, (*CHAT_RULES, BATCH_RULES)))

    messages: list[list[dict[str, Any]]] = Field(
        description="conversations, each of which is answered once",
        json_schema_extra={"minItems": 1, "items": {"type": "array", **MESSAGES}},
    )


class PooledBody(Body):
    """Fields of all calls that pool texts."""

    add_special_tokens: bool | None = Field(None, description="default: true for texts, false for messages")
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = None
    priority: int | None = None
    tenant: str | None = None
    cache_salt: str | None = Field(None, min_length=1)
    kv_priority: Literal["low", "normal", "high"] = "normal"


class InputBody(PooledBody):
    """Fields of pooling calls that accept prompts of any form, or a conversation with texts and pictures."""

    model_config = ConfigDict(
        json_schema_extra=body_schema_extra(IGNORED, NO_OP_VALUES, [exactly_one("input", "messages")])
    )

    objects: ClassVar[Mapping[str, Shape]] = {"messages": MESSAGE}

    input: PromptField | None = None
    messages: list[dict[str, Any]] | None = Field(
        None, json_schema_extra=MESSAGES, description="one conversation, which is pooled as its chat template shows it"
    )
    add_generation_prompt: Flag = False
    continue_final_message: Flag = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = Field(None, description="options of the model's media processor")
    media_io_kwargs: dict[str, dict[str, Any]] | None = Field(
        None, description="by modality: image_mode and rgba_background_color of image; num_frames and fps of video"
    )

    @model_validator(mode="before")
    @classmethod
    def _has_one_prompt(cls, sent: Any) -> Any:
        """Raises InvalidArgument unless exactly one of `input` and `messages` is there."""
        if isinstance(sent, dict) and (sent.get("input") is None) == (sent.get("messages") is None):
            given = "neither" if sent.get("input") is None else "both"
            text = f"exactly one of input and messages must be given, got {given}"
            raise InvalidArgument(text, field="input")
        return sent


class EmbeddingBody(InputBody):
    """Request body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = Field(None, description="default: float")
    dimensions: int | None = Field(
        None, description="number of leading elements to keep, normalised again", json_schema_extra={"minimum": 1}
    )
    pooler: str | None = Field(
        None, description="default: the model's own", json_schema_extra={"enum": [None, "", "last", "mean", "cls"]}
    )
    normalize: bool | None = Field(None, description="normalise vectors to length 1; default: as the model does")
    use_activation: bool | None = Field(None, description="vLLM's name of normalize")
    prompt_name: str | None = Field(
        None, description="name of a prompt of the model's folder, which is put before the texts"
    )


class PoolingBody(EmbeddingBody):
    """Request body of POST /pooling: a vector or a classifier's scores for each text."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = Field(
        None, description="default: the model's task; token_*: one vector per token"
    )
    pooler: str | None = Field(
        None, description="default: the model's own", json_schema_extra={"enum": [None, *POOLERS]}
    )
    step_tag_id: int | None = Field(None, description="with pooler step: the token that has a vector")


class ClassifyBody(InputBody):
    """Request body of POST /classify."""


FIRST, SECOND = ("queries", "text_1", "data_1"), ("documents", "items", "text_2", "data_2")


class ScoreBody(PooledBody):
    """Request body of POST /score: one text compared with all others, or pair by pair."""

    model_config = ConfigDict(
        json_schema_extra=body_schema_extra(IGNORED, NO_OP_VALUES, [exactly_one(*FIRST), exactly_one(*SECOND)])
    )

    queries: ScoredInputsField | None = Field(None, description="also as text_1 or data_1")
    documents: ScoredInputsField | None = Field(None, description="also as items, text_2 or data_2")
    items: ScoredInputsField | None = None
    text_1: ScoredInputsField | None = None
    text_2: ScoredInputsField | None = None
    data_1: ScoredInputsField | None = None
    data_2: ScoredInputsField | None = None


class RerankBody(PooledBody):
    """Request body of POST /rerank, as in Jina's and Cohere's APIs."""

    query: ScoredInputField
    documents: ScoredInputsField
    top_n: int | None = Field(None, ge=0, description="maximum number of documents, the best ones; default or 0: all")
    return_documents: Flag = True


class TokenizeBody(Body):
    """Request body of POST /tokenize."""

    model_config = ConfigDict(
        json_schema_extra=body_schema_extra(IGNORED, NO_OP_VALUES, [{"anyOf": [given("prompt"), given("messages")]}])
    )

    objects: ClassVar[Mapping[str, Shape]] = {"messages": MESSAGE, "tools": TOOL}

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, json_schema_extra=MESSAGES)
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """Request body of POST /detokenize."""

    tokens: Annotated[list[int], WrapValidator(_keep_packed_ids)]


class LoadAdapterBody(BaseModel):
    """Request body of POST /v1/load_lora_adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str
    lora_path: str = Field(
        description="folder of the adapter on the workers' machines, or relative to their lora_folders"
    )
    load_inplace: Flag = Field(False, description="replace the adapter that is loaded under this name")


class UnloadAdapterBody(BaseModel):
    """Request body of POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str
    lora_int_id: int | None = Field(None, description="ignored: adapters are identified by their names")
