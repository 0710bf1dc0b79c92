"""Checks the test vectors, sizes and example messages in protos/README.md."""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.message import Message

from quire.shared.columns import i32, i32_bytes, u32
from quire.shared.kv import block_hash
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from quire.shared.pb.worker.v1 import worker_pb2

README = Path(__file__).resolve().parents[2] / "protos" / "README.md"
EXAMPLE = re.compile(r"```textproto\n# (\w+)\n(.*?)```", re.DOTALL)
TYPES: dict[str, type[Message]] = {
    "AttachRequest": worker_pb2.AttachRequest,
    "AttachResponse": worker_pb2.AttachResponse,
    "SessionResponse": scheduler_pb2.SessionResponse,
}
BLOCK_SIZE = 4  # of the recorded run


def test_the_test_vectors_of_the_block_hash_hold() -> None:
    root = block_hash.root_hash()
    computed = [
        root,
        block_hash.root_hash(salt="tenant-7"),
        block_hash.root_hash(adapter="sql-lora"),
        *block_hash.chain(root, i32_bytes(range(40)), 16),
        *block_hash.chain(block_hash.root_hash(salt="tenant-7"), i32_bytes(range(16)), 16),
        *block_hash.chain(root, i32_bytes([-1, 2**31 - 1, 0, 7]), 4),
    ]
    assert re.findall(r"`([0-9a-f]{64})`", README.read_text()) == [h.hex() for h in computed]


def test_a_steady_plan_is_as_small_as_claimed() -> None:
    plan = worker_pb2.StepPlan(epoch=1_795_178_545_369, step_id=1_000_000)
    message = worker_pb2.AttachResponse(plan=plan)
    assert message.ByteSize() <= 20
    plan.new_block_ids = i32_bytes(range(16))
    assert worker_pb2.AttachResponse(plan=plan).ByteSize() <= 20 + 4 * 16 + 4


def test_the_example_messages_parse_and_follow_the_slot_rules() -> None:
    messages = [text_format.Parse(text, TYPES[name]()) for name, text in EXAMPLE.findall(README.read_text())]
    assert len(messages) == 8
    plans = [message.plan for message in messages if isinstance(message, worker_pb2.AttachResponse)]
    results = [message.result for message in messages if isinstance(message, worker_pb2.AttachRequest)]
    assert [plan.step_id for plan in plans] == [1, 2, 3, 4]
    assert [result.step_id for result in results] == [1, 2, 3]
    assert len({message.epoch for message in (*plans, *results)}) == 1

    (admission,) = plans[0].admitted
    assert admission.root_hash == block_hash.root_hash()
    num_tokens, num_computed, num_blocks = admission.num_prompt_tokens, 0, 0
    for plan, result in zip(plans, results, strict=False):
        scheduled = int(u32(plan.token_counts)[0]) if plan.counted_slots else int(num_computed == num_tokens - 1)
        num_computed += scheduled
        num_blocks += len(u32(plan.new_block_ids))
        assert num_blocks == -(-num_computed // BLOCK_SIZE), "a plan provides exactly the blocks that are missing"
        assert num_computed == num_tokens, "the slot samples"
        num_tokens += len(i32(result.token_ids))

    (end,) = [message.tokens for message in messages if isinstance(message, scheduler_pb2.SessionResponse)]
    assert end.token_ids == results[-1].token_ids
    assert end.finished[0].reason == finish_pb2.FINISH_REASON_LENGTH
    assert u32(plans[-1].released_slots).tolist() == [plans[-1].admitted[0].slot] == [admission.slot]
