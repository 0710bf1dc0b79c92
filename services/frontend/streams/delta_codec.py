"""Encodes deltas so that another frontend can continue a stream: everything but the text, which follows from the
tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.services.frontend.output_processor.answer_parser import CallDelta, Part
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.outcome import Finish, TokenLogprobs
from quire.shared.columns import i32, i32_bytes
from quire.shared.errors import Internal
from quire.shared.pb.frontend.v1 import stream_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2


def encode_delta(delta: SampleDelta) -> pb.ResumableDelta:
    """Returns the stored form of a delta: token ids and the length of the text, which is regenerated from them,
    log-probabilities, tool call ids and end."""
    return pb.ResumableDelta(
        sample=delta.sample,
        token_ids=i32_bytes(delta.token_ids),
        num_characters=len(delta.text),
        logprobs=_encode_logprobs(delta.logprobs),
        prompt_logprobs=_encode_logprobs(delta.prompt_logprobs),
        call_ids=[part.id for part in delta.parts or () if isinstance(part, CallDelta) and part.id],
        ending=None if delta.finish is None else _ending(delta.finish),
    )


def decode_delta(kept: pb.ResumableDelta) -> SampleDelta:
    """Returns the delta of its stored form, without its text and parts, which the generation regenerates."""
    finish = _finish(kept.ending) if kept.HasField("ending") else None
    token_ids: list[int] = i32(kept.token_ids).tolist()
    prompt_logprobs = _decode_logprobs(kept.prompt_logprobs)
    return SampleDelta(
        kept.sample, token_ids, "", _decode_logprobs(kept.logprobs), finish, prompt_logprobs=prompt_logprobs
    )


def restore_call_ids(delta: SampleDelta, kept: pb.ResumableDelta) -> SampleDelta:
    """Returns a regenerated delta with the tool call ids of the original. Raises Internal if its text has another
    length."""
    if len(delta.text) != kept.num_characters:
        raise Internal(
            f"the stream cannot be continued: its tokens decode to {len(delta.text)} characters at this frontend, "
            f"{kept.num_characters} at the one before"
        )
    if not kept.call_ids or delta.parts is None:
        return delta
    ids = iter(kept.call_ids)
    return delta._replace(parts=[_with_original_id(part, ids) for part in delta.parts])


def _with_original_id(part: Part, ids: Iterator[str]) -> Part:
    """Returns the part with the next of `ids` if it begins a tool call; other parts as they are."""
    if not isinstance(part, CallDelta) or not part.id:
        return part
    return part._replace(id=next(ids, part.id))


def _ending(finish: Finish) -> pb.ResumableDelta.Ending:
    """Returns the stored form of a sample's end; a score is not stored."""
    return pb.ResumableDelta.Ending(
        reason=finish.reason,
        stop_token_id=finish.stop_token_id,
        stop_string=finish.stop_string,
        weight_version=finish.weight_version,
    )


def _finish(ending: pb.ResumableDelta.Ending) -> Finish:
    """Returns the end of its stored form; it has no score."""
    stop_token_id = ending.stop_token_id if ending.HasField("stop_token_id") else None
    stop_string = ending.stop_string if ending.HasField("stop_string") else None
    return Finish(ending.reason, stop_token_id, stop_string, weight_version=ending.weight_version)


def _encode_logprobs(entries: Iterable[TokenLogprobs]) -> list[inference_pb2.TokenLogprobs]:
    """Returns the stored form of log-probabilities, one entry per position."""
    return [
        inference_pb2.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=[inference_pb2.TokenLogprobs.Candidate(token_id=id, logprob=logprob) for id, logprob in entry.top],
        )
        for entry in entries
    ]


def _decode_logprobs(entries: Iterable[inference_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    """Returns the stored log-probabilities; they were 32-bit floats and keep their values."""
    return [
        TokenLogprobs(entry.token_id, entry.logprob, entry.rank, [(one.token_id, one.logprob) for one in entry.top])
        for entry in entries
    ]
