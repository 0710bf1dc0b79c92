"""A draining scheduler, with or without workers: every token arrives once, in order, with its log-probabilities."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.shared.columns import i32_bytes
from quire.shared.kv import block_hash
from quire.shared.pb.common.v1 import finish_pb2, sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scheduler_client.test_sessions import tokens_of, until_told
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

NUM_TOKENS = 40
SAMPLING = sampling_pb2.SamplingParams(max_tokens=NUM_TOKENS, n=3, seed=3, temperature=1, logprobs=2)
SAMPLED = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(30)), sampling=SAMPLING)
EXPECTED = [[(3 + sample + i) % 200 for i in range(NUM_TOKENS)] for sample in range(3)]


@asynccontextmanager
async def two(folder: Path, **settings: Any) -> AsyncIterator[tuple[ScriptedScheduler, ScriptedScheduler, Running]]:
    """Sequences go to the first; the second is slower to start."""
    leaving, heir = ScriptedScheduler(count_up, step_s=0.005), ScriptedScheduler(count_up, num_running=5)
    async with scheduler(leaving), scheduler(heir), running(folder, leaving.address, heir.address, **settings) as it:
        await it.until_sessions(2)
        yield leaving, heir, it


async def read(frontend: Running, asked: pb.GenerateRequest = SAMPLED) -> list[pb.GenerateResponse]:
    return [message async for message in frontend.inference.Generate(asked)]


def assert_whole(messages: list[pb.GenerateResponse]) -> None:
    for sample, expected in enumerate(EXPECTED):
        assert tokens_of(messages, sample) == expected
        entries = [entry for message in messages if message.index == sample for entry in message.logprobs]
        assert [entry.token_id for entry in entries] == expected
        assert all(len(entry.top) == 2 for entry in entries)
        ends = [message.finish_reason for message in messages if message.index == sample and message.finish_reason]
        assert ends == [finish_pb2.FINISH_REASON_LENGTH]


async def test_a_drain_with_hand_over_loses_and_repeats_nothing(folder: Path) -> None:
    async with two(folder) as (leaving, heir, frontend):
        reading = asyncio.create_task(read(frontend))
        await until_told(leaving, frontend, 7)
        leaving.set_view(draining=True)
        await frontend.until_sessions(1)
        new = asyncio.create_task(read(frontend))
        await heir.until(lambda: heir.submissions)
        leaving.resume()
        await until_told(leaving, frontend, 10)  # no new sequences there; running ones continue while the worker lives
        assert leaving.num_running == 3
        leaving.set_view(num_workers=0)
        messages = await reading
        assert_whole(await new)
        metrics = await frontend.metrics()
    assert_whole(messages)
    assert len(leaving.submissions) == 1
    moved = [s for s in heir.submissions if s.num_sequences == 1]
    assert [s.sampling.seed for s in moved] == [3, 4, 5]
    for sample, submission in enumerate(moved):
        ids = array("i", submission.token_ids).tolist()
        assert ids[:30] == list(range(30))
        assert ids[30:] == EXPECTED[sample][: len(ids) - 30] != []
        assert submission.block_hashes == b"".join(block_hash.chain(submission.root_hash, i32_bytes(ids), 16))
    assert metrics["quire_frontend_migration_seconds_count"] == 3
    assert metrics["quire_frontend_resubmitted_sequences_total"] == 3
    assert metrics["vllm:generation_tokens_total"] == 2 * 3 * NUM_TOKENS


async def test_a_shard_that_dies_and_one_that_refuses_are_one_pause(folder: Path) -> None:
    async with two(folder) as (dying, heir, frontend):
        heir.refusal = finish_pb2.Error(code=finish_pb2.ERROR_CODE_UNAVAILABLE, message="not yet", retry_after_ms=100)
        reading = asyncio.create_task(read(frontend))
        await until_told(dying, frontend, 7)
        dying.set_view(draining=True, num_workers=0)
        dying.break_sessions()
        await heir.until(lambda: len(heir.submissions) >= 6)
        heir.refusal = None
        assert_whole(await reading)
        metrics = await frontend.metrics()
    assert metrics["quire_frontend_migration_seconds_count"] == 3
    assert metrics["quire_frontend_migration_seconds_sum"] > 3 * 0.1


@pytest.mark.parametrize("how", ["breaks", "loses its workers"])
async def test_what_has_no_token_yet_has_no_pause_to_measure(folder: Path, how: str) -> None:
    async with two(folder) as (leaving, heir, frontend):
        leaving.pause()
        reading = asyncio.create_task(read(frontend))
        await leaving.until(lambda: leaving.num_running == 3)
        if how == "breaks":
            leaving.view.num_workers = 0
            leaving.break_sessions()
        else:
            leaving.set_view(num_workers=0)
        assert_whole(await reading)
        metrics = await frontend.metrics()
    assert len(heir.submissions) == 3
    assert metrics["quire_frontend_migration_seconds_count"] == 0


async def test_every_shard_leaving_in_turn_is_survived(folder: Path) -> None:
    async with two(folder) as (one, other, frontend):
        other.step_s = 0.005
        reading = asyncio.create_task(read(frontend))
        await until_told(one, frontend, 4)
        one.resume()
        for gone, here in ((one, other), (other, one)) * 3:
            gone.set_view(num_workers=0)
            await here.until(lambda here=here: here.num_running == 3 or reading.done())
            gone.set_view(num_workers=1)
        assert_whole(await reading)


async def test_a_beam_search_is_submitted_again_as_one(folder: Path) -> None:
    async with two(folder) as (leaving, heir, frontend):
        leaving.pause()
        heir.pause()
        sampling = sampling_pb2.SamplingParams(max_tokens=5, n=3, beam_search={"width": 4}, seed=3)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(30)), sampling=sampling)
        reading = asyncio.ensure_future(read(frontend, request))
        await leaving.until(lambda: leaving.num_running == 3)
        leaving.break_sessions()
        await heir.until(lambda: heir.num_running == 3)
        leaving.resume()
        heir.resume()
        messages = await reading
    (again,) = heir.submissions
    assert (again.num_sequences, again.sampling.beam_search.width) == (3, 4)
    assert sorted(m.index for m in messages if m.finish_reason) == [0, 1, 2]


async def test_a_beam_search_that_is_refused_for_now_is_asked_again_as_one(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        script.refusal = finish_pb2.Error(code=finish_pb2.ERROR_CODE_UNAVAILABLE, message="draining", retry_after_ms=50)
        sampling = sampling_pb2.SamplingParams(max_tokens=5, n=2, beam_search={"width": 2}, seed=3)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(30)), sampling=sampling)
        reading = asyncio.ensure_future(read(frontend, request))
        await script.until(lambda: len(script.submissions) >= 2)
        script.refusal = None
        messages = await reading
    assert {submission.num_sequences for submission in script.submissions} == {2}
    assert sorted(m.index for m in messages if m.finish_reason) == [0, 1]
