"""Calls of the inference API, each defined once: method, request, and conversion of the response.

`Client` and `AsyncClient` send them, one blocking and one awaiting. A streaming call converts each message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quire import outputs
from quire.outputs import Classification, Delta, Ranked
from quire.params import SamplingParams
from quire.requests import (
    ChatExtras,
    ChatMessages,
    EmbedExtras,
    Prompt,
    RequestOptions,
    Scored,
    chat_request,
    classify_request,
    embed_request,
    final_only_options,
    generate_request,
    is_single_prompt,
    rerank_request,
    score_request,
)
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.transcriptions import TranscriptDelta, TranscriptionExtras, transcript_delta, transcription_messages

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class InferenceCall(Generic[T_co]):
    """One call; `read` converts the response, or each message of a stream."""

    method: str
    request: Any
    read: Callable[[Any], T_co]

    def on(self, stub: Any, timeout_s: float | None = None) -> Any:
        """Starts the call; returns what the channel's stub returns: a response, an awaitable, or a stream."""
        return getattr(stub, self.method)(self.request, timeout=timeout_s)


def _same(message: T) -> T:
    return message


def generation(prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None) -> InferenceCall[Delta]:
    request = generate_request(prompt, params, options or RequestOptions())
    return InferenceCall("Generate", request, outputs.delta)


def whole_generation(
    prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None
) -> InferenceCall[pb.GenerateResponse]:
    """Returns a generation() call with one message per sample."""
    return InferenceCall("Generate", generate_request(prompt, params, final_only_options(options)), _same)


def generation_messages(
    prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None
) -> InferenceCall[pb.GenerateResponse]:
    return InferenceCall("Generate", generate_request(prompt, params, options or RequestOptions()), _same)


def chat(
    messages: ChatMessages, params: SamplingParams | None, options: RequestOptions | None, extras: ChatExtras
) -> InferenceCall[Delta]:
    return InferenceCall("Chat", chat_request(messages, params, options or RequestOptions(), extras), outputs.delta)


def whole_chat(
    messages: ChatMessages, params: SamplingParams | None, options: RequestOptions | None, extras: ChatExtras
) -> InferenceCall[pb.ChatResponse]:
    """Returns a chat() call with one message per sample."""
    return InferenceCall("Chat", chat_request(messages, params, final_only_options(options), extras), _same)


def embed(
    inputs: Prompt | Sequence[Prompt], options: RequestOptions | None, extras: EmbedExtras
) -> InferenceCall[list[list[float]]]:
    return InferenceCall("Embed", embed_request(_batch(inputs), options or RequestOptions(), extras), outputs.vectors)


def embed_stream(
    inputs: Prompt | Sequence[Prompt], options: RequestOptions | None, extras: EmbedExtras
) -> InferenceCall[tuple[int, list[float]]]:
    """Returns a streaming call whose messages are (input index, vector), in order of completion."""
    asked = embed_request(_batch(inputs), options or RequestOptions(), extras)
    return InferenceCall("EmbedStream", pb.EmbedStreamRequest(embed=asked), outputs.vector)


def encode(
    inputs: Prompt | Sequence[Prompt], options: RequestOptions | None, extras: EmbedExtras
) -> InferenceCall[list[list[list[float]]]]:
    """Returns a call for one vector per token of each input."""
    request = embed_request(_batch(inputs), options or RequestOptions(), extras)
    return InferenceCall("Embed", request, outputs.token_vectors)


def classify(inputs: Prompt | Sequence[Prompt], options: RequestOptions | None) -> InferenceCall[list[Classification]]:
    request = classify_request(_batch(inputs), options or RequestOptions())
    return InferenceCall("Classify", request, outputs.classifications)


def score(
    queries: str | Sequence[str], documents: Scored | Sequence[Scored], options: RequestOptions | None
) -> InferenceCall[list[float]]:
    """Returns a call for one score per (query, document) pair."""
    request = score_request(queries, documents, options or RequestOptions())
    return InferenceCall("Score", request, lambda answer: [*answer.scores])


def rerank(
    query: str, documents: Sequence[Scored], top_n: int, options: RequestOptions | None
) -> InferenceCall[list[Ranked]]:
    """Returns a call for the `top_n` best documents (0: all), best first."""
    request = rerank_request(query, documents, top_n, options or RequestOptions())
    return InferenceCall("Rerank", request, outputs.ranked)


def transcribe(
    sound: Any, options: RequestOptions | None, extras: TranscriptionExtras
) -> InferenceCall[TranscriptDelta]:
    """Returns a streaming call whose messages are parts of a transcript; it can be started once."""
    return InferenceCall("Transcribe", transcription_messages(sound, options, extras), transcript_delta)


def attach(request_id: str, offset: int, tenant: str) -> InferenceCall[Delta]:
    request = pb.AttachRequest(request_id=request_id, offset=offset, tenant=tenant)
    return InferenceCall("Attach", request, outputs.attached)


def cancel(request_id: str, tenant: str) -> InferenceCall[None]:
    return InferenceCall("Cancel", pb.CancelRequest(request_id=request_id, tenant=tenant), lambda _answer: None)


def tokenize(text: str) -> InferenceCall[list[int]]:
    return InferenceCall("Tokenize", pb.TokenizeRequest(text=text), lambda answer: list(answer.token_ids))


def detokenize(token_ids: Sequence[int]) -> InferenceCall[str]:
    return InferenceCall("Detokenize", pb.DetokenizeRequest(token_ids=token_ids), lambda answer: str(answer.text))


def models() -> InferenceCall[list[pb.Model]]:
    return InferenceCall("ListModels", pb.ListModelsRequest(), lambda answer: list(answer.models))


def _batch(inputs: Prompt | Sequence[Prompt]) -> list[Any]:
    return [inputs] if is_single_prompt(inputs) else list(inputs)
