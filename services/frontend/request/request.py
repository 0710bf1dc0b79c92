"""What a client asked. Both edges make these values; nothing behind them knows which edge it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.services.frontend.request.scalar_parameters import BY_NAME
from quire.shared.pb.common.v1 import sampling_pb2


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to continue."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class LateInteractionPrompt(TextPrompt):
    """Text that a model reads to compare it token by token (shared/models/late_interaction.py)."""

    is_query: bool = False
    query: str | None = None  # of a document: what it is compared with, so that it ends in one number


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """Two texts side by side, as a tokenizer joins a question and what may answer it."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Tokens to continue, taken as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, put through the chat template: role, content (text, a list of text parts, or None), and where given
    name, tool_calls, tool_call_id, reasoning. A tool call's arguments are an object or JSON text."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True  # the template ends with the start of the assistant's answer
    continue_final_message: bool = False  # the last message is the beginning of the answer
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False  # templates write them themselves
    tools: Sequence[Mapping[str, Any]] = ()  # as the template shows them: OpenAI's form
    template: str = ""  # name of one of the model's templates; empty: its default


Prompt = TextPrompt | PairPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class TextInput:
    """What a tool takes that is called with a text in place of an object: any text, or what a grammar allows."""

    syntax: str = ""  # lark or regex, of `definition`; empty: any text
    definition: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the answer may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)  # JSON Schema of its arguments
    description: str = ""
    strict: bool = False  # its calls have to fit the schema, though nobody requires one
    text_input: TextInput | None = None  # then `parameters` has one, INPUT (tool_offer.py), which the client gets alone


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions that an answer may call."""

    tools: tuple[Tool, ...]
    choice: str = "auto"  # or required: at least one call
    name: str = ""  # with required: the function that is to be called
    parallel: bool = True  # more than one call in an answer


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """Ends a sample once it ends with `min_count` copies of one pattern of min_ to max_pattern_size tokens."""

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
class Sampling:
    """How to choose tokens, named as in protos/quire/common/v1/sampling.proto; the defaults are the protocol's."""

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None  # the server draws one
    max_tokens: int | None = None  # depends on the prompt
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
    prompt_logprob_token_ids: Sequence[Sequence[int]] = ()  # by position from prompt_logprob_start on
    flat_logprobs: bool = False
    thinking_token_budget: int | None = None  # -1: no bound, like None
    structured_output: sampling_pb2.StructuredOutput | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    skip_reading_prefix_cache: bool = False
    logits_processors: Mapping[str, str] = field(default_factory=dict)  # name -> arguments, JSON
    scalars: Mapping[str, float] = field(
        default_factory=dict
    )  # what was given of the parameters of scalar_parameters.py

    def value(self, name: str) -> float:
        """Returns the value of one of those parameters; its default where none was given."""
        return self.scalars.get(name, BY_NAME[name].default)


@dataclass(frozen=True, slots=True)
class Pooling:
    """One vector of each prompt in place of samples: PoolingParams of pooling.proto."""

    pooler: str = ""  # last, mean, cls, all or step; empty: the model's own
    normalize: bool | None = None  # None: as the model does
    dimensions: int | None = None  # only the first so many
    classify: bool = False  # what the model's classifier makes of it
    step_tag_id: int | None = None  # with step: the token that has a vector
    prompt_name: str = ""  # of what the model's folder puts before texts; empty: its own choice


@dataclass(frozen=True, slots=True)
class Request:
    """One call: every prompt is continued `sampling.n` times. Times are those of the event loop's clock, seconds."""

    request_id: str
    model: str  # empty: the only one
    prompts: Sequence[Prompt]
    sampling: Sampling
    arrival_s: float
    deadline_s: float | None = None
    priority: int = 0  # smaller runs earlier, where schedulers go by it
    tenant: str = ""
    cache_salt: str = ""
    kv_priority: str = "normal"  # of the prompt in tiers below the device
    adapter: str = ""  # that `model` names; empty: the model itself
    truncate_prompt_tokens: int | None = None  # keep the last so many; -1: as many as leave room for the output
    truncation_side: str = "left"  # "right": keep the first instead
    default_max_tokens: int | None = None  # None: what fits in the model's context
    final_only: bool = False  # the reader wants each sample in one piece, when it has ended
    stream_interval: int = 1  # tokens from one piece of a sample to the next
    parse_answer: bool = False  # the reader wants reasoning and tool calls apart from the content
    tool_use: ToolUse | None = None
    include_reasoning: bool = True
    return_times: bool = False
    structured_output_field: str = ""  # the body's, if several can ask for a form of the output
    pooling: Pooling | None = None  # None: prompts are continued
    traceparent: str = ""  # W3C, where this request is sampled
    strict_length: bool = False  # refuse a max_tokens that cannot fit (OpenAI's rule) instead of stopping where it ends

    @property
    def asks_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None or bool(self.sampling.prompt_logprob_token_ids)

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.sampling.n

    def max_requested_output_tokens(self, max_model_len: int) -> int:
        """Of all samples; an answer of open length promises nothing, and none can promise more than `max_model_len` (0
        while nobody knows it)."""
        promised = 0 if self.pooling is not None else self.sampling.max_tokens or self.default_max_tokens or 0
        return self.num_samples * (min(promised, max_model_len) if max_model_len else promised)
