"""Conversion of the frontend's values to messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.openai_edge.answers.format import FINISH_REASONS
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.outcome import Finish, TokenLogprobs
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.dialects import vllm_engine_pb2 as pb

ABORTED = Finish(finish_pb2.FINISH_REASON_CANCELLED)


def generate_responses(delta: SampleDelta, generation: Generation, *, streams: bool) -> Iterator[pb.GenerateResponse]:
    """Yields a delta's messages: in a stream a chunk, and after the last one the sample's end, which repeats it."""
    usage = generation.sample_usage(delta.sample)
    output, prompt = _output_logprobs(delta, generation), _input_logprobs(delta, generation)
    if streams:
        yield pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=len(delta.token_ids),
                cached_tokens=usage.cached_tokens,
                output_logprobs=output,
                input_logprobs=prompt,
                index=delta.sample,
            )
        )
    if delta.finish is not None:
        complete = pb.GenerateComplete(
            output_ids=delta.token_ids,
            finish_reason=FINISH_REASONS[delta.finish.reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=len(delta.token_ids),
            cached_tokens=usage.cached_tokens,
            output_logprobs=output,
            input_logprobs=None if streams else prompt,
            index=delta.sample,
        )
        if delta.finish.stop_string is not None:
            complete.matched_stop_str = delta.finish.stop_string
        elif delta.finish.stop_token_id is not None:
            complete.matched_token_id = delta.finish.stop_token_id
        yield pb.GenerateResponse(complete=complete)


def aborted(sample: int, generation: Generation) -> Iterator[pb.GenerateResponse]:
    """Yields the end of a sample that was aborted."""
    return generate_responses(SampleDelta(sample, [], "", [], ABORTED), generation, streams=False)


def _output_logprobs(delta: SampleDelta, generation: Generation) -> pb.OutputLogProbs | None:
    """Returns the logprobs of the delta's tokens, None if it has none; top candidates only if more than 0 were
    requested."""
    if not delta.logprobs:
        return None
    message = pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in delta.logprobs],
        token_ids=[entry.token_id for entry in delta.logprobs],
    )
    if generation.request.sampling.logprobs:
        message.top_logprobs.extend(_top(delta.logprobs))
    return message


def _input_logprobs(delta: SampleDelta, generation: Generation) -> pb.InputLogProbs | None:
    """Returns the prompt's logprobs, None if not requested. The first prompt token has an id and an empty value,
    since nothing precedes it."""
    if not delta.prompt_logprobs:
        return None
    first = generation.prepared[delta.sample // generation.request.sampling.n].token_ids[0]
    message = pb.InputLogProbs(token_ids=[first, *(entry.token_id for entry in delta.prompt_logprobs)])
    message.token_logprobs.add()
    message.token_logprobs.extend(pb.InputTokenLogProb(value=entry.logprob) for entry in delta.prompt_logprobs)
    if generation.request.sampling.prompt_logprobs:
        message.top_logprobs.add()
        message.top_logprobs.extend(_top(delta.prompt_logprobs))
    return message


def _top(entries: Sequence[TokenLogprobs]) -> Iterator[pb.TopLogProbs]:
    """Yields one message per token with the logprobs and ids of its top candidates."""
    for entry in entries:
        yield pb.TopLogProbs(
            values=[logprob for _, logprob in entry.top], token_ids=[token_id for token_id, _ in entry.top]
        )
