"""A client's request, independent of the edge it came through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.services.frontend.request.media import DEFAULT_MEDIA_OPTIONS, MediaOptions, MediaPart
from quire.services.frontend.request.scalar_parameters import BY_NAME
from quire.shared.pb.common.v1 import sampling_pb2


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to continue or to embed, tokenized without a chat template."""

    text: str
    add_special_tokens: bool = True
    media: Sequence[MediaPart] = ()  # for the placeholders in the text, in order
    decoder: str | Sequence[int] | None = None  # encoder-decoder models of text: what the decoder continues


@dataclass(frozen=True, slots=True)
class LateInteractionPrompt(TextPrompt):
    """Text of a query or document whose token vectors are compared one by one (shared/models/late_interaction.py)."""

    is_query: bool = False
    query: str | None = None  # for a document: the query to score it against; the result is one number


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Two texts that the tokenizer joins, such as a question and a candidate answer."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to continue, used as they are."""

    token_ids: Sequence[int]
    media: Sequence[MediaPart] = ()  # for the placeholders among the ids, in order
    decoder: str | Sequence[int] | None = None  # as in TextPrompt


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the chat template, each with role and content (text, a list of parts, or None), and optionally name,
    tool_calls, tool_call_id and reasoning. Tool call arguments are an object or JSON text. A part of type image, video
    or audio has the index of its item in `media` under "number"."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True  # append the start of the assistant's turn
    continue_final_message: bool = False  # the last message is the start of the answer
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False  # templates add them
    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form, as templates expect them
    template: str = ""  # name of one of the model's templates; empty: its default
    media: Sequence[MediaPart] = ()


Prompt = TextPrompt | PairPrompt | TokenPrompt | ChatPrompt


def decoder_of(prompt: Prompt) -> str | Sequence[int] | None:
    """Returns what the decoder of an encoder-decoder model continues; None: the request does not say."""
    return prompt.decoder if isinstance(prompt, TextPrompt | TokenPrompt) else None


def media_of(prompt: Prompt) -> Sequence[MediaPart]:
    """Returns the media of a prompt."""
    return () if isinstance(prompt, PairPrompt) else prompt.media


@dataclass(frozen=True, slots=True)
class TextInput:
    """Input of a tool that takes a text instead of an object: any text, or text that matches a grammar."""

    syntax: str = ""  # lark or regex, of `definition`; empty: any text
    definition: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call, in the form common to all edges."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON Schema of its arguments
    description: str = ""
    strict: bool = False  # calls must match the schema, also with tool_choice auto
    # Set: `parameters` has the single property INPUT (tool_offer.py), and clients get its value as the call's text.
    text_input: TextInput | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that an answer may or must call."""

    tools: tuple[Tool, ...]
    choice: str = "auto"  # or required: at least one call
    name: str = ""  # with required: the function to call
    parallel: bool = True  # allow several calls in one answer


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """Ends a sample that ends with `min_count` copies of a pattern of min_ to max_pattern_size tokens."""

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Keeps the `width` most likely sequences instead of sampling, and returns the best of them."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class TimestampRules:
    """Rules for the time stamps of Whisper: TimestampRules of worker.proto."""

    first_id: int  # of 0.00 s
    declining_id: int  # the token that declines time stamps
    max_initial_steps: int | None = None  # most steps of 0.02 s of the first one; None: any


@dataclass(frozen=True, slots=True)
class Alignment:
    """Requests to which rows of the encoder's output tokens attend: AlignmentParams of worker.proto."""

    first_position: int  # of the prompt; all later tokens are aligned
    num_rows: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, named as in protos/quire/common/v1/sampling.proto, with the protocol's defaults."""

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None  # None: drawn by the server
    max_tokens: int | None = None  # None: limited by the context length
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    repetition_detection: RepetitionDetection | None = None
    beam_search: BeamSearch | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    prompt_logprob_start: int = 0
    prompt_logprob_token_ids: Sequence[Sequence[int]] = ()  # per position from prompt_logprob_start on
    flat_logprobs: bool = False
    thinking_token_budget: int | None = None  # -1 or None: unlimited
    structured_output: sampling_pb2.StructuredOutput | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    skip_reading_prefix_cache: bool = False
    logits_processors: Mapping[str, str] = field(default_factory=dict)  # name -> arguments as JSON
    timestamps: TimestampRules | None = None
    scalars: Mapping[str, float] = field(
        default_factory=dict
    )  # values given for the parameters of scalar_parameters.py

    def value(self, name: str) -> float:
        """Returns the value of a scalar parameter, or its default if none was given."""
        return self.scalars.get(name, BY_NAME[name].default)


@dataclass(frozen=True, slots=True)
class Pooling:
    """Requests one vector per prompt instead of samples: PoolingParams of pooling.proto."""

    pooler: str = ""  # last, mean, cls, all or step; empty: the model's own
    normalize: bool | None = None  # None: the model's default
    dimensions: int | None = None  # keep only the first `dimensions` components
    classify: bool = False  # apply the model's classification head
    step_tag_id: int | None = None  # pooler step: the token whose positions are pooled
    prompt_name: str = ""  # name of a prompt prefix of the model's configuration; empty: its default
    alignment: Alignment | None = None  # rows of numbers in place of vectors; None: vectors


@dataclass(frozen=True, slots=True)
class Request:
    """One call; every prompt is continued `sampling.n` times. Times are the event loop's clock, in seconds."""

    request_id: str
    model: str  # empty: the served model
    prompts: Sequence[Prompt]
    sampling: Sampling
    arrival_s: float
    deadline_s: float | None = None
    priority: int = 0  # lower runs earlier, under the priority scheduling policy
    tenant: str = ""
    cache_salt: str = ""
    kv_priority: str = "normal"  # retention priority of the prompt's KV in tiers below the device
    adapter: str = ""  # the adapter that `model` names; empty: the base model
    truncate_prompt_tokens: int | None = None  # keep this many tokens; -1: as many as leave space for the output
    truncation_side: str = "left"  # "left": drop the first tokens; "right": drop the last
    default_max_tokens: int | None = None  # None: up to the context length
    final_only: bool = False  # deliver each sample in one piece when it has ended
    stream_interval: int = 1  # tokens between two deltas of a sample
    parse_answer: bool = False  # separate reasoning and tool calls from the content
    tool_use: ToolUse | None = None
    include_reasoning: bool = True
    return_times: bool = False
    structured_output_field: str = ""  # body field that requested structured output, if several can
    pooling: Pooling | None = None  # None: generate
    traceparent: str = ""  # W3C trace context, if the request is traced
    media_options: MediaOptions = DEFAULT_MEDIA_OPTIONS
    strict_length: bool = False  # refuse a max_tokens beyond the context (OpenAI's rule) instead of shortening it

    @property
    def asks_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None or bool(self.sampling.prompt_logprob_token_ids)

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.sampling.n

    def max_requested_output_tokens(self, max_model_len: int) -> int:
        """Upper bound on output tokens of all samples, as requested; 0 for an open length. A single sample counts at
        most `max_model_len` (0: unknown)."""
        requested = 0 if self.pooling is not None else self.sampling.max_tokens or self.default_max_tokens or 0
        return self.num_samples * (min(requested, max_model_len) if max_model_len else requested)
