"""Tests that output is merged without a reader, and that order, ends and errors are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest

from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.sample import AT_END, Mailbox, Sample
from quire.services.frontend.output_processor.sample_text import new_text
from quire.services.frontend.output_processor.wakeup_pacer import WakeupPacer
from quire.services.frontend.request.outcome import Finish, TokenLogprobs
from quire.services.frontend.request.request import Sampling
from quire.services.frontend.scheduler_client.sequence import SequenceEnd
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import Internal
from quire.shared.metrics.frontend import TokenTraffic
from quire.shared.pb.common.v1 import finish_pb2
from tests.waiting import loop_turns

LENGTH = SequenceEnd(Finish(finish_pb2.FINISH_REASON_LENGTH))
STOP = SequenceEnd(Finish(finish_pb2.FINISH_REASON_STOP))


class RecordingOwner:
    """Owner of samples that records its calls."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_start(self, sample: Sample, num_cached_tokens: int, queue_us: int, encode_us: int) -> None:
        self.events.append("start")

    def on_first_token(self, sample: Sample, now: float) -> None:
        self.events.append("first token")

    def on_done(self, sample: Sample, end: SequenceEnd, now: float) -> None:
        self.events.append("done")


def new_mailbox() -> Mailbox:
    return Mailbox(WakeupPacer(lambda _seconds: None))


def new_sample(
    tokenizer: Tokenizer,
    mailbox: Mailbox,
    index: int = 0,
    hidden_stop_ids: Collection[int] = (),
    *,
    final_only: bool = False,
    interval: int = 1,
    **sampling: object,
) -> tuple[Sample, RecordingOwner]:
    asked = Sampling(**sampling)  # type: ignore[arg-type]
    owner = RecordingOwner()
    sample = Sample(
        index,
        new_text(asked, tokenizer, final_only=final_only),
        hidden_stop_ids=frozenset() if asked.include_stop_str_in_output else frozenset(hidden_stop_ids),
        mailbox=mailbox,
        traffic=TokenTraffic(("m", "0")),
        owner=owner,
        interval=AT_END if final_only else interval,
    )
    return sample, owner


async def test_output_is_posted_at_the_first_token_and_then_at_intervals(tokenizer: Tokenizer) -> None:
    mailbox = new_mailbox()
    sample, _ = new_sample(tokenizer, mailbox, interval=3)
    ids = tokenizer.encode_inline("the quick brown fox jumps over", add_special_tokens=False)[:6]
    pieces = []
    for count, token in enumerate(ids):
        sample.on_tokens([token], [], LENGTH if count == 5 else None, float(count))
        if mailbox.ready:
            (delta,) = await mailbox.next_deltas()
            pieces.append((count, len(delta.token_ids), delta.text))
    assert [(count, size) for count, size, _ in pieces] == [(0, 1), (3, 3), (5, 2)]
    assert "".join(text for _, _, text in pieces) == tokenizer.decode(ids, skip_special_tokens=True)


async def test_output_between_two_reads_is_one_delta_per_sample(tokenizer: Tokenizer) -> None:
    mailbox = new_mailbox()
    one, _ = new_sample(tokenizer, mailbox, 0)
    two, _ = new_sample(tokenizer, mailbox, 1)
    ids = tokenizer.encode_inline("hello world", add_special_tokens=False)
    for token_id in ids:
        one.on_tokens([token_id], [], None, 0.0)
        two.on_tokens([token_id], [], None, 0.0)
    assert await mailbox.next_deltas() == [SampleDelta(i, ids, "hello world", [], None) for i in (0, 1)]
    one.on_tokens(ids[:1], [], LENGTH, 0.0)
    assert [(d.sample, d.token_ids, d.finish) for d in await mailbox.next_deltas()] == [(0, ids[:1], LENGTH.finish)]


async def test_a_waiting_reader_is_woken(tokenizer: Tokenizer) -> None:
    mailbox = new_mailbox()
    sample, _ = new_sample(tokenizer, mailbox)
    reading = asyncio.create_task(mailbox.next_deltas())
    await loop_turns()
    assert not reading.done()
    sample.on_tokens([65], [], None, 0.0)
    assert (await reading)[0].token_ids == [65]


@pytest.mark.parametrize("stop", [(), ("zzz",)])
async def test_a_final_only_sample_has_no_output_before_its_end(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    mailbox = new_mailbox()
    sample, _ = new_sample(tokenizer, mailbox, final_only=True, stop=stop)
    ids = tokenizer.encode_inline("hello world", add_special_tokens=False)
    reading = asyncio.create_task(mailbox.next_deltas())
    for token_id in ids[:-1]:
        sample.on_tokens([token_id], [], None, 0.0)
        await loop_turns(2)
    assert not reading.done()
    sample.on_tokens(ids[-1:], [], LENGTH, 0.0)
    assert await reading == [SampleDelta(0, ids, "hello world", [], LENGTH.finish)]


async def test_an_error_follows_the_pending_output(tokenizer: Tokenizer) -> None:
    mailbox = new_mailbox()
    sample, _ = new_sample(tokenizer, mailbox)
    sample.on_tokens([65], [], None, 0.0)
    mailbox.fail(Internal("first"))
    mailbox.fail(Internal("second"))
    assert (await mailbox.next_deltas())[0].token_ids == [65]
    with pytest.raises(Internal, match="first"):
        await mailbox.next_deltas()


async def test_pending_output_of_a_failed_sample_has_no_finish(tokenizer: Tokenizer) -> None:
    mailbox = new_mailbox()
    sample, _ = new_sample(tokenizer, mailbox)
    sample.on_tokens([65], [], None, 0.0)
    sample.on_end(SequenceEnd(Finish(finish_pb2.FINISH_REASON_ERROR), Internal("lost")), 0.0)
    mailbox.fail(Internal("lost"))
    assert [(delta.token_ids, delta.finish) for delta in await mailbox.next_deltas()] == [([65], None)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("final_only", [False, True])
def test_the_stop_token_has_text_only_if_included(tokenizer: Tokenizer, include: bool, final_only: bool) -> None:
    hello, world = (tokenizer.encode_inline(text, add_special_tokens=False) for text in ("hello", " world"))
    asked = {"include_stop_str_in_output": include, "final_only": final_only}
    sample, owner = new_sample(tokenizer, new_mailbox(), hidden_stop_ids=world[:1], **asked)
    sample.on_tokens(hello, [], None, 0.0)
    sample.on_tokens(world[:1], [], STOP, 0.0)
    delta = sample.take_delta()
    assert delta.token_ids == hello + world[:1]
    assert delta.text == "hello" + (tokenizer.decode(world[:1], skip_special_tokens=True) if include else "")
    assert owner.events == ["first token", "done"]


def test_tokens_after_a_stop_string_are_not_reported(tokenizer: Tokenizer) -> None:
    sample, _ = new_sample(tokenizer, new_mailbox(), stop=["wor"])
    ids = tokenizer.encode_inline("hello world and more", add_special_tokens=False)
    logprobs = [TokenLogprobs(i, -0.5, 1, []) for i in ids]
    assert sample.on_tokens(ids, logprobs, None, 0.0)
    delta = sample.take_delta()
    assert delta.text == "hello "
    assert delta.finish == Finish(finish_pb2.FINISH_REASON_STOP, stop_string="wor")
    assert "wor" in tokenizer.decode(delta.token_ids, skip_special_tokens=True)
    assert delta.token_ids == ids[: len(delta.token_ids)] != ids
    assert len(delta.logprobs) == len(delta.token_ids) == sample.num_tokens


def test_held_back_text_is_emitted_at_the_end(tokenizer: Tokenizer) -> None:
    sample, _ = new_sample(tokenizer, new_mailbox(), stop=["world!"])
    ids = tokenizer.encode_inline("hello world", add_special_tokens=False)
    sample.on_tokens(ids, [], None, 0.0)
    assert sample.take_delta().text == "hello "
    sample.on_end(LENGTH, 0.0)
    assert sample.take_delta().text == "world"


def test_answers_without_detokenization_have_no_text(tokenizer: Tokenizer) -> None:
    sample, _ = new_sample(tokenizer, new_mailbox(), detokenize=False)
    sample.on_tokens([65, 66], [], LENGTH, 0.0)
    assert sample.take_delta() == SampleDelta(0, [65, 66], "", [], LENGTH.finish)
