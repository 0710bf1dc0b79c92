"""An authenticated frontend with malformed messages: invalid values cost no other service's time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from quire.shared import columns
from quire.shared.pb.common.v1 import finish_pb2, model_pb2
from quire.shared.pb.common.v1.sampling_pb2 import BeamSearch, RepetitionDetection
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from tests.services.scheduler.scripted_peers import MODEL, FrontendPeer
from tests.services.scheduler.test_trust import PROMPT, SecuredScheduler, scheduler
from tests.waiting import loop_turns

LARGE = 2**32 - 1
INVALID = finish_pb2.ERROR_CODE_INVALID_ARGUMENT


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[SecuredScheduler]:
    async with scheduler(tmp_path) as started:
        await started.worker()
        yield started


async def frontend(running: SecuredScheduler) -> FrontendPeer:
    peer = FrontendPeer(running.address)
    await peer.open()
    await peer.until(lambda: peer.view.num_workers)
    return peer


async def end_of(peer: FrontendPeer) -> str:
    async with asyncio.timeout(60):
        assert await peer.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await asyncio.gather(peer.session, return_exceptions=True)
        return str(await peer.call.details())


@pytest.mark.parametrize(
    ("first", "fields", "text"),
    [
        (1, {"num_sequences": LARGE}, f"num_sequences: must be at most 16384, got {LARGE}"),
        (1, {"num_sequences": 16_385}, "num_sequences: must be at most 16384, got 16385"),
        (LARGE, {"num_sequences": 2}, f"first_sequence_id: {LARGE} and 2 sequences are beyond"),
    ],
)
async def test_invalid_sequence_ids_end_the_session(
    running: SecuredScheduler, first: int, fields: dict[str, int], text: str
) -> None:
    liar, other = await frontend(running), await frontend(running)
    before = time.process_time()
    await liar.submit(first, PROMPT, **fields)
    assert text in await end_of(liar)
    await other.submit(1, PROMPT, max_tokens=4)
    await other.ended(1)
    assert time.process_time() - before < 2.0


async def test_a_sequence_id_that_is_in_use_ends_the_session(running: SecuredScheduler) -> None:
    liar = await frontend(running)
    await liar.submit(5, PROMPT, max_tokens=40, num_sequences=3)
    await liar.submit(7, PROMPT, max_tokens=40, behind_the_last=True)  # before the others can end
    assert "first_sequence_id: sequence 7 is in use" in await end_of(liar)
    other = await frontend(running)
    await other.submit(7, PROMPT, max_tokens=4)
    await other.ended(7)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"block_hashes": bytes(32 * 1000)}, "block_hashes: 1000 hashes for 3 tokens"),
        ({"stop_token_ids": bytes(4 * 100_000)}, "stop_token_ids: 100000, the limit is"),
        ({"eos_token_ids": bytes(4 * 100_000)}, "eos_token_ids: 100000, the limit is"),
        ({"request_id": "r" * 10_000}, "request_id: 10000 characters, the limit is 1024"),
        ({"tenant": "t" * 10_000}, "tenant: 10000 characters, the limit is 1024"),
        ({"age_ms": 2**63}, "age_ms: 9223372036854775808, the limit is"),
        ({"timeout_ms": 2**63}, "timeout_ms: 9223372036854775808, the limit is"),
        ({"grammar": bytes(2**21)}, "grammar: 2097152 bytes, the limit is"),
        ({"params": bytes(2**25)}, "params: 33554432 bytes, the limit is"),
        (
            {"repetition_detection": RepetitionDetection(max_pattern_size=LARGE, min_count=2)},
            f"repetition_detection.max_pattern_size: {LARGE}, the limit is",
        ),
        (
            {"repetition_detection": RepetitionDetection(max_pattern_size=2, min_count=LARGE)},
            f"repetition_detection.min_count: {LARGE}, the limit is",
        ),
        ({"beam_search": BeamSearch(width=LARGE)}, f"beam_search.width: {LARGE}, the limit is 16384"),
        ({"beam_search": BeamSearch(width=2, length_penalty=-33)}, "beam_search.length_penalty: -33, the limit is 32"),
        ({"beam_search": BeamSearch(width=2, length_penalty=1e30)}, "beam_search.length_penalty: 1e+30, the limit"),
        ({"num_sequences": 16_384, "token_ids": bytes(4 * 20_000)}, "token_ids: 16384 sequences of 20000 tokens"),
    ],
)
async def test_a_field_beyond_its_limit_is_refused_by_name_value_and_limit(
    running: SecuredScheduler, fields: dict[str, object], text: str
) -> None:
    liar = await frontend(running)
    await liar.submit(1, [7, 1, 3], **fields)
    await liar.submit(100_000, PROMPT, max_tokens=4)
    last = int(fields.get("num_sequences", 1))  # type: ignore[call-overload]
    await liar.ended(1, last, 100_000)
    assert liar.finished[1].error.code == INVALID
    assert text in liar.finished[1].error.message
    assert liar.finished[100_000].reason != finish_pb2.FINISH_REASON_ERROR


async def test_a_million_empty_submissions_and_cancellations_do_not_block_the_loop(running: SecuredScheduler) -> None:
    liar, other = await frontend(running), await frontend(running)
    empty = [pb.Submission()] * 20_000
    cancelled = columns.u32_bytes(range(100_000))
    for _ in range(3):
        liar.link.send(pb.SessionRequest(submission=pb.Submission(), further_submissions=empty))
        liar.link.send(pb.SessionRequest(cancellation=pb.Cancellation(sequence_ids=cancelled)))
    await loop_turns()
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await loop_turns()
            turns += 1

    counting = asyncio.create_task(count_turns())
    await liar.submit(1, PROMPT, max_tokens=4)
    await liar.ended(1)
    counting.cancel()
    assert turns > 3 * 120_000 // 64, "others had their turns in between"
    await other.submit(1, PROMPT, max_tokens=4)
    await other.ended(1)


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        ({"frontend_id": "f" * 300}, "frontend_id: "),
        ({"model": model_pb2.ModelIdentity(name="m" * 300)}, "model.name: "),
        ({"model": model_pb2.ModelIdentity(vocab_size=LARGE)}, f"model.vocab_size: frontend f0 has {LARGE}, the limit"),
        ({"model": model_pb2.ModelIdentity(fingerprint="0" * 300)}, "model.fingerprint: "),
    ],
)
async def test_a_hello_beyond_its_limits_is_refused(tmp_path: Path, hello: dict[str, object], text: str) -> None:
    """No service has set the model yet."""
    async with scheduler(tmp_path) as empty:
        asked = pb.FrontendHello(frontend_id="f0", model=MODEL)
        asked.MergeFrom(pb.FrontendHello(**hello))  # type: ignore[arg-type]
        channel = FrontendPeer(empty.address).dialler.connect(empty.address)
        async with channel:
            call = channel.stream_stream(
                "/quire.scheduler.v1.SchedulerService/Session",
                request_serializer=pb.SessionRequest.SerializeToString,
                response_deserializer=pb.SessionResponse.FromString,
            )()
            await call.write(pb.SessionRequest(hello=asked))
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert text in await call.details()
