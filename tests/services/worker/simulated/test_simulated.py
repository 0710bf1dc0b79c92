"""Simulated workers: real protocol, real time, invented tokens, no torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from quire.services.worker.codec.step_codec import decode_plan
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.simulated.engine import SimulatedEngine
from quire.services.worker.simulated.main import serve
from quire.services.worker.simulated.timing import Timing
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.result import StepResult
from quire.shared import columns
from quire.shared.pb.common.v1 import media_pb2, sampling_pb2
from quire.shared.pb.common.v1.pooling_pb2 import PoolingParams
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process.lifecycle import Shutdown
from quire.shared.settings import WorkerSettings
from tests.services.frontend.media.seeing_folder import write_seeing_folder
from tests.services.worker.scripted_scheduler import ScriptedScheduler
from tests.waiting import eventually

LIMITS = WorkerLimits(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=40)


class Receiver:
    """Receives the results."""

    def __init__(self) -> None:
        self.results: asyncio.Queue[StepResult] = asyncio.Queue()
        self.reasons: list[str] = []

    def deliver(self, result: StepResult) -> None:
        self.results.put_nowait(result)

    def abort_session(self, reason: str) -> None:
        self.reasons.append(reason)


def admit(step_id: int, prompt: int, seed: int, blocks: list[int]) -> pb.StepPlan:
    admission = pb.Admission(
        slot=0,
        token_ids=columns.i32_bytes([1] * prompt),
        num_prompt_tokens=prompt,
        params=pb.SequenceParams(sampling=sampling_pb2.SamplingParams(seed=seed, max_tokens=9)).SerializeToString(),
        root_hash=bytes(32),
    )
    return pb.StepPlan(
        epoch=1,
        step_id=step_id,
        admitted=[admission],
        counted_slots=columns.u32_bytes([0]),
        token_counts=columns.u32_bytes([prompt]),
        new_block_ids=columns.u32_bytes(blocks),
    )


async def tokens_of(engine: SimulatedEngine, prompt: int, seed: int, steps: int) -> list[int]:
    receiver = Receiver()
    await engine.start_epoch(receiver)  # type: ignore[arg-type]
    engine.submit(receiver, decode_plan(admit(1, prompt, seed, list(range(1, -(-prompt // 4) + 1)))))  # type: ignore[arg-type]
    tokens = []
    for step_id in range(2, steps + 2):
        result = await receiver.results.get()
        tokens += result.token_ids.tolist()
        needs_block = (prompt + step_id - 2) % 4 == 0
        blocks = np.array([30 + step_id] if needs_block else [], np.uint32)
        engine.submit(receiver, StepPlan(1, step_id, blocks))  # type: ignore[arg-type]
    assert not receiver.reasons
    return tokens


async def test_migrated_sequence_continues_with_the_same_tokens() -> None:
    engine = SimulatedEngine(LIMITS, 100, Timing(0.001, 0, 0))
    running = asyncio.ensure_future(engine.run())
    whole = await tokens_of(engine, 6, seed=7, steps=5)
    moved = await tokens_of(engine, 8, seed=7, steps=3)
    other = await tokens_of(engine, 6, seed=8, steps=5)
    running.cancel()
    assert moved == whole[2:]
    assert other != whole
    assert all(0 <= token < 100 for token in whole)


async def test_steps_take_the_modelled_time() -> None:
    engine = SimulatedEngine(LIMITS, 100, Timing(0.02, 0.001, 0))
    running = asyncio.ensure_future(engine.run())
    begin = time.monotonic()
    await tokens_of(engine, 10, seed=1, steps=4)
    running.cancel()
    assert time.monotonic() - begin >= 4 * 0.02 + 0.01


async def test_a_plan_that_breaks_the_rules_breaks_the_session() -> None:
    engine = SimulatedEngine(LIMITS, 100, Timing(0.001, 0, 0))
    running = asyncio.ensure_future(engine.run())
    receiver = Receiver()
    await engine.start_epoch(receiver)  # type: ignore[arg-type]
    engine.submit(receiver, decode_plan(admit(1, 8, 1, [1, 2, 3])))  # type: ignore[arg-type]
    await eventually(lambda: receiver.reasons)
    running.cancel()
    assert "step 1 breaks the session" in receiver.reasons[0]


@pytest.mark.parametrize("module", ["quire.services.worker.simulated.main"])
def test_no_torch_is_needed(module: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import {module}"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_step_costs_a_constant_its_prompts_and_its_sequences() -> None:
    timing = Timing(0.01, 0.001, 0.0001)
    assert np.isclose(timing.seconds(num_tokens=110, num_decoding=10), 0.01 + 0.1 + 0.001)


async def test_pooling_sequence_fails_alone() -> None:
    """There is nothing to pool; other sequences of the step continue."""
    engine = SimulatedEngine(LIMITS, 100, Timing(0.001, 0, 0))
    running = asyncio.ensure_future(engine.run())
    receiver = Receiver()
    await engine.start_epoch(receiver)  # type: ignore[arg-type]
    plan = admit(1, 4, 7, [1])
    plan.admitted[0].samples_nothing = True
    plan.admitted[0].params = pb.SequenceParams(pooling=PoolingParams()).SerializeToString()
    engine.submit(receiver, decode_plan(plan))  # type: ignore[arg-type]
    result = await receiver.results.get()
    running.cancel()
    assert [slot for slot, _ in result.failures] == [0]
    assert not len(result.token_ids)
    assert not receiver.reasons


async def test_pictures_are_announced_and_reported_at_once(tmp_path: Path) -> None:
    """As by a worker with an encoder, so that schedulers can be measured with pictures."""
    write_seeing_folder(tmp_path)
    scheduler, shutdown = ScriptedScheduler(), Shutdown()
    await scheduler.start()
    settings = WorkerSettings(model=str(tmp_path), scheduler=f"127.0.0.1:{scheduler.port}", engine="simulated")
    serving = asyncio.ensure_future(serve(settings, shutdown))
    session, hello = await scheduler.attached(epoch=1)
    assert hello.encoder.capacity >= 1 << 15
    assert list(hello.encoder.modalities) == ["image"]
    item = media_pb2.MediaItem(identifier=b"i" * 32, length=4, num_embeddings=4, modality="image")
    prepared = await session.prepare_media(item, "nowhere:1")
    assert (prepared.identifier, prepared.HasField("error")) == (b"i" * 32, False)
    shutdown.request()
    await session.leaving()
    session.close()
    await serving
    await scheduler.stop()
