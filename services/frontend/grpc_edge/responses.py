"""Converts results to messages of the public protocol."""

from __future__ import annotations

from collections.abc import Sequence

from quire.services.frontend.calls.measurements import Usage
from quire.services.frontend.generation.catalogue import CatalogueEntry
from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.output_processor.answer_parser import CallDelta, Part
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.request.outcome import Finish, TokenLogprobs
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb

Response = pb.GenerateResponse | pb.ChatResponse


def generate_response(request_id: str, delta: SampleDelta) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id=request_id, index=delta.sample, token_ids=delta.token_ids, text=delta.text)


def chat_response(request_id: str, delta: SampleDelta) -> pb.ChatResponse:
    """Returns the message of a delta, with its parsed parts (content, reasoning, tool calls) or, unparsed, its text as
    content."""
    if delta.parts is None:
        return pb.ChatResponse(request_id=request_id, index=delta.sample, token_ids=delta.token_ids, content=delta.text)
    response = pb.ChatResponse(request_id=request_id, index=delta.sample, token_ids=delta.token_ids)
    for part in delta.parts:
        _add_part(response, part)
    return response


def _add_part(response: pb.ChatResponse, part: Part) -> None:
    """Adds one part of the parsed answer; texts of the same kind are joined."""
    match part:
        case Content(text):
            response.content += text
        case Reasoning(text):
            response.reasoning += text
        case CallDelta(number, call_id, name, arguments):
            response.tool_calls.add(index=number, id=call_id, name=name, arguments=arguments)


def add_details(response: Response, delta: SampleDelta, generation: Generation, is_first: bool) -> None:
    """Adds in place what only some messages carry: log-probabilities; finish reason and times with the last of a
    sample; usage with the first and last. `is_first`: of the whole call."""
    if delta.logprobs or delta.prompt_logprobs:
        _add_logprobs(response, delta, flat=generation.request.sampling.flat_logprobs)
    if delta.finish is not None:
        _add_finish(response, delta.finish)
        if generation.request.return_times:
            response.times.CopyFrom(_times(generation, delta.sample))
    if is_first or delta.finish is not None:
        response.usage.CopyFrom(usage_of(generation.usage))


def usage_of(usage: Usage) -> finish_pb2.Usage:
    """Returns the token counts as a message."""
    return finish_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def _times(generation: Generation, sample: int) -> finish_pb2.Times:
    """Returns the durations of one sample and the call's time spans in microseconds; 0 for those not reached."""
    queue_us, first_token_us, generation_us = (_us(seconds or 0) for seconds in generation.sample_times(sample))
    return finish_pb2.Times(
        queue_us=queue_us,
        first_token_us=first_token_us,
        generation_us=generation_us,
        hop_us=_us(generation.latency.hop_s or 0),
        **{f"{name}_us": _us(end_s - begin_s) for name, begin_s, end_s in generation.time_spans()},
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _add_finish(response: Response, finish: Finish) -> None:
    """Adds the finish reason, the weight version, and either the stop string or the stop token that matched."""
    response.finish_reason = finish.reason
    response.weight_version = finish.weight_version
    if finish.score is not None:
        response.score = finish.score
    if finish.stop_string is not None:
        response.stop_string = finish.stop_string
    elif finish.stop_token_id is not None:
        response.stop_token_id = finish.stop_token_id


def _add_logprobs(response: Response, delta: SampleDelta, *, flat: bool) -> None:
    """Adds the log-probabilities of output and prompt. `flat`: as arrays instead of one message per position."""
    if not flat:
        response.logprobs.extend(_logprobs(entry) for entry in delta.logprobs)
        response.prompt_logprobs.extend(_logprobs(entry) for entry in delta.prompt_logprobs)
        return
    if delta.logprobs:
        response.flat_logprobs.CopyFrom(_arrays(delta.logprobs))
    if delta.prompt_logprobs:
        response.flat_prompt_logprobs.CopyFrom(_arrays(delta.prompt_logprobs))


def _arrays(entries: Sequence[TokenLogprobs]) -> pb.LogprobArrays:
    """Returns log-probabilities as flat arrays; per position the sampled token comes first, and only its rank is
    given."""
    pairs = [pair for entry in entries for pair in ((entry.token_id, entry.logprob), *entry.top)]
    return pb.LogprobArrays(
        entry_counts=[1 + len(entry.top) for entry in entries],
        token_ids=[token_id for token_id, _ in pairs],
        logprobs=[logprob for _, logprob in pairs],
        ranks=[entry.rank for entry in entries],
    )


def _logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.TokenLogprobs.Candidate(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return pb.TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank, top=top)


def model(entry: CatalogueEntry) -> pb.Model:
    """Returns the catalogue's entry as a message."""
    return pb.Model(
        name=entry.name,
        max_model_len=entry.max_model_len,
        vocab_size=entry.vocab_size,
        ready=entry.ready,
        created_unix_s=entry.created_unix_s,
        adapter_of=entry.adapter_of,
        input_modalities=entry.input_modalities,
    )
