"""Hellos and results of workers are validated; an invalid one ends the session with the field's name."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import pytest

from quire.services.scheduler.replicas import result_checks
from quire.shared import columns
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.scheduler.reference_worker import VOCAB, oracle
from tests.services.scheduler.scripted_peers import FrontendPeer, WorkerPeer
from tests.services.scheduler.test_trust import LIMITS, PROMPT, SecuredScheduler, scheduler

Lie = Callable[[pb.StepResult], None]


class MalformedResultPeer(WorkerPeer):
    """Computes correctly, and reports something else."""

    lie: Lie = staticmethod(lambda _wire: None)

    def result(self, result: object) -> pb.StepResult:
        wire = super().result(result)
        self.lie(wire)
        return wire


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[SecuredScheduler]:
    async with scheduler(tmp_path) as started:
        yield started


async def refusal_of(running: SecuredScheduler, **hello: object) -> str:
    peer = WorkerPeer(running.address, LIMITS, hello=pb.WorkerHello(**hello))  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asyncio.wait_for(peer.run(), 60)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    return str(refused.value.details())


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        ({"kv_cache": {"num_blocks": 20_000_000}}, "num_blocks: worker w0 has 20000000, the limit is 2097152"),
        ({"kv_cache": {"num_blocks": 2**32 - 1}}, "num_blocks: worker w0 has 4294967295, the limit is"),
        (
            {"limits": {"max_num_seqs": 2**31, "max_num_batched_tokens": 2**31}},
            "max_num_seqs: worker w0 has 2147483648, the limit",
        ),
        ({"limits": {"max_num_batched_tokens": 2**31}}, "max_num_batched_tokens: worker w0 has 2147483648, the limit"),
        ({"limits": {"max_model_len": 2**32 - 1}}, "max_model_len: worker w0 has"),
        (
            {"drafting": {"num_speculative_tokens": 10_000}},
            "num_speculative_tokens: worker w0 has 10000, the limit is 256",
        ),
        ({"layout": {"block_size": 2**31}}, "layout.block_size: worker w0 has 2147483648, the limit is 65536"),
        ({"worker_id": "w" * 100_000}, r"worker_id: 'w{40}' \(100000 characters\) is not a name"),
        ({"device": "d" * 300}, "device: "),
        ({"held": {"block_ids": b"abc"}}, "held_block_ids: 3 bytes of ids"),
        ({"held": {"block_ids": bytes(4)}}, "held_block_ids: 4 bytes of ids and 0 of hashes do not fit worker w0's"),
        ({"held": {"block_ids": bytes(4), "block_hashes": bytes(32)}}, "blocks are 1 to 63, and 0 to 0 were sent"),
        (
            {"held": {"host_place_ids": bytes(4), "host_place_hashes": bytes(32)}},
            "do not fit worker w0's places, 0",
        ),
        ({"kv_cache": {"num_host_blocks": 1 << 31}}, "num_host_blocks: worker w0 has 2147483648, the limit is 2097152"),
        ({"held": {"block_ids": columns.u32_bytes([64]), "block_hashes": bytes(32)}}, "and 64 to 64 were sent"),
        (
            {"held": {"block_ids": bytes(4 * 100), "block_hashes": bytes(3200)}},
            "3200 of hashes do not fit worker w0's blocks, 63",
        ),
    ],
)
async def test_a_hello_beyond_its_limits_is_refused_by_field_value_and_limit(
    running: SecuredScheduler, hello: dict[str, object], text: str
) -> None:
    before = time.process_time()
    seen = await refusal_of(running, **hello)
    assert re.search(text, seen), seen
    assert time.process_time() - before < 2.0, "nothing was allocated for it"


def _negative(wire: pb.StepResult) -> None:
    wire.token_ids = columns.i32_bytes([-5] * (len(wire.token_ids) // 4))


def _unknown(wire: pb.StepResult) -> None:
    wire.token_ids = columns.i32_bytes([VOCAB] * (len(wire.token_ids) // 4))


def _logprobs(wire: pb.StepResult) -> None:
    wire.logprobs.entry_counts = columns.u32_bytes([5])


def _failure(wire: pb.StepResult) -> None:
    wire.failures.add(slot=7, error=finish_pb2.Error(code=4711, message="no such slot, no such code"))  # type: ignore


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (_negative, "token_ids: -5 is not in the vocabulary of"),
        (_unknown, f"token_ids: {VOCAB} is not in the vocabulary of {VOCAB} tokens"),
        (
            lambda wire: setattr(wire, "token_ids", wire.token_ids + b"x"),
            "token_ids: 1 are due, the worker sent 5 bytes",
        ),
        (lambda wire: setattr(wire, "token_ids", b""), "token_ids: 1 are due, the worker sent 0 bytes"),
        (lambda wire: setattr(wire, "token_counts", b"abc"), "token_counts: 1 are due, the worker sent 3 bytes"),
        (lambda wire: setattr(wire, "token_counts", columns.u32_bytes([2**32 - 1])), "token_counts: at most 1 tokens"),
        (
            lambda wire: setattr(wire, "draft_counts", columns.u32_bytes([9])),
            "draft_counts: the worker drafts 0 at most",
        ),
        (_logprobs, "logprobs.token_ids: 5 are due, the worker sent 0 bytes"),
        (lambda wire: setattr(wire.prompt_logprobs, "slots", b"abc"), "prompt_logprobs.slots: 3 bytes are no column"),
        (lambda wire: setattr(wire.prompt_logprobs, "slots", bytes(4)), "prompt_logprobs: no prompts that ask"),
        (_failure, r"failures: slots \[7\] do not all sample"),
        (lambda wire: setattr(wire, "epoch", 1), "epoch: the scheduler is at"),
        (lambda wire: setattr(wire, "step_id", 99), "step_id: the scheduler waits for"),
    ],
)
async def test_an_invalid_result_ends_only_its_session(running: SecuredScheduler, lie: Lie, text: str) -> None:
    def when_it_samples(wire: pb.StepResult) -> None:
        if wire.token_ids:
            lie(wire)
            liar.wrong = True

    liar = MalformedResultPeer(running.address, LIMITS, id="liar")
    liar.lie = when_it_samples  # type: ignore[method-assign]
    task = asyncio.ensure_future(liar.run())
    await asyncio.wait_for(liar.attached.wait(), 60)
    frontend = FrontendPeer(running.address)
    await frontend.open()
    await frontend.submit(0, PROMPT, max_tokens=12, eos_token_ids=b"")
    with pytest.raises(grpc.aio.AioRpcError, match=text) as ended:
        await asyncio.wait_for(task, 60)
    assert ended.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    _, honest = await running.worker("w1")
    await frontend.ended(0)
    assert frontend.tokens[0] == oracle(PROMPT, len(PROMPT) + 12, eos=False)
    honest.cancel()
    await asyncio.gather(honest, return_exceptions=True)
    await frontend.close()


class TokenlessPeer(WorkerPeer):
    """Answers every plan with a step without tokens."""

    num_steps = 0

    async def take(self, message: pb.AttachResponse) -> None:
        if message.WhichOneof("message") == "plan":
            self.num_steps += 1
            empty = pb.StepResult(epoch=self.epoch, step_id=message.plan.step_id, token_counts=bytes(4))
            self.link.send(pb.AttachRequest(result=empty))
        else:
            await super().take(message)


@pytest.mark.parametrize(
    ("num_drafts", "text"),
    [
        (2, "token_counts: slot 0 has got no token in 1000 steps that sample it"),
        (0, "token_counts: a worker that does not draft gives a token to each slot"),
    ],
)
async def test_a_worker_that_never_returns_a_token_is_detached(
    running: SecuredScheduler, num_drafts: int, text: str
) -> None:
    liar = TokenlessPeer(
        running.address,
        LIMITS,
        id="liar",
        hello=pb.WorkerHello(drafting=pb.Drafting(num_speculative_tokens=num_drafts)),
    )
    task = asyncio.ensure_future(liar.run())
    await asyncio.wait_for(liar.attached.wait(), 60)
    frontend = FrontendPeer(running.address)
    await frontend.open()
    await frontend.submit(0, PROMPT, max_tokens=12, eos_token_ids=b"")
    with pytest.raises(grpc.aio.AioRpcError, match=text):
        await asyncio.wait_for(task, 60)
    assert liar.num_steps <= result_checks.MAX_STEPS_WITHOUT_TOKEN + 10
    await frontend.close()
