"""What is kept of a delta, so that another frontend can go on behind it: everything but its text, which follows."""

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
    return pb.ResumableDelta(
        sample=delta.sample,
        token_ids=i32_bytes(delta.token_ids),
        num_characters=len(delta.text),
        logprobs=_kept_logprobs(delta.logprobs),
        prompt_logprobs=_kept_logprobs(delta.prompt_logprobs),
        call_ids=[part.id for part in delta.parts or () if isinstance(part, CallDelta) and part.id],
        ending=None if delta.finish is None else _ending(delta.finish),
    )


def decode_delta(kept: pb.ResumableDelta) -> SampleDelta:
    """Without its text."""
    finish = _finish(kept.ending) if kept.HasField("ending") else None
    token_ids: list[int] = i32(kept.token_ids).tolist()
    prompt_logprobs = _logprobs(kept.prompt_logprobs)
    return SampleDelta(kept.sample, token_ids, "", _logprobs(kept.logprobs), finish, prompt_logprobs=prompt_logprobs)


def restore_call_ids(delta: SampleDelta, kept: pb.ResumableDelta) -> SampleDelta:
    """A delta that was made again, with the ids that were drawn for its calls then. Internal if its text is another."""
    if len(delta.text) != kept.num_characters:
        raise Internal(
            f"a stream cannot go on: its tokens have {len(delta.text)} characters here and {kept.num_characters} before"
        )
    if not kept.call_ids or delta.parts is None:
        return delta
    ids = iter(kept.call_ids)
    return delta._replace(parts=[_renamed(part, ids) for part in delta.parts])


def _renamed(part: Part, ids: Iterator[str]) -> Part:
    if not isinstance(part, CallDelta) or not part.id:
        return part
    return part._replace(id=next(ids, part.id))


def _ending(finish: Finish) -> pb.ResumableDelta.Ending:
    return pb.ResumableDelta.Ending(
        reason=finish.reason,
        stop_token_id=finish.stop_token_id,
        stop_string=finish.stop_string,
        weight_version=finish.weight_version,
    )


def _finish(ending: pb.ResumableDelta.Ending) -> Finish:
    stop_token_id = ending.stop_token_id if ending.HasField("stop_token_id") else None
    stop_string = ending.stop_string if ending.HasField("stop_string") else None
    return Finish(ending.reason, stop_token_id, stop_string, weight_version=ending.weight_version)


def _kept_logprobs(entries: Iterable[TokenLogprobs]) -> list[inference_pb2.TokenLogprobs]:
    return [
        inference_pb2.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=[inference_pb2.TokenLogprobs.Candidate(token_id=id, logprob=logprob) for id, logprob in entry.top],
        )
        for entry in entries
    ]


def _logprobs(entries: Iterable[inference_pb2.TokenLogprobs]) -> list[TokenLogprobs]:
    """Which came as 32 bits, and are the same again."""
    return [
        TokenLogprobs(entry.token_id, entry.logprob, entry.rank, [(one.token_id, one.logprob) for one in entry.top])
        for entry in entries
    ]
