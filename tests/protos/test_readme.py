"""What protos/README.md claims."""

from __future__ import annotations

import re
from pathlib import Path

from quire.shared.columns import i32_bytes
from quire.shared.kv import block_hash
from quire.shared.pb.worker.v1 import worker_pb2

README = Path(__file__).resolve().parents[2] / "protos" / "README.md"


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
