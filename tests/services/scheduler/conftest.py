"""Fixtures shared by the scheduler's tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.running.running import Mask, Running
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.core.timing.forecast import Forecast
from quire.services.scheduler.kv_cache.groups import KVGroups
from quire.shared import columns
from quire.shared.kv import block_hash

TraceFunction = Callable[[FrameType, str, Any], Any]


def make_sequence(
    key: int, prompt: list[int], max_tokens: int = 16, block_size: int = 16, **fields: object
) -> Sequence:
    tokens = columns.i32_bytes(prompt)
    root = block_hash.root_hash(salt=str(fields.pop("salt", "")))
    return Sequence(
        key=key,
        owner=0,
        sequence_id=key,
        tokens=SequenceTokens(tokens),
        num_prompt_tokens=len(prompt),
        max_total_tokens=len(prompt) + max_tokens,
        root_hash=root,
        block_hashes=block_hash.chain(root, tokens, block_size),
        **fields,  # type: ignore[arg-type]
    )


class UnlimitedForecast(Forecast):
    """Forecast that admits every sequence, so that blocks run out."""

    def fits(self, running: Running, counted: Mask, newcomer: Sequence, num_blocks: int, groups: KVGroups) -> bool:
        return True


def make_limits(**fields: object) -> CoreLimits:
    defaults: dict[str, object] = {
        "num_blocks": 10_000,
        "block_size": 16,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "enable_prefix_caching": False,
        "max_steps_in_flight": 1,
    }
    return CoreLimits(**(defaults | fields))  # type: ignore[arg-type]


@pytest.fixture
def core() -> Callable[..., Core]:
    return lambda **fields: Core(make_limits(**fields))


def count_operations(work: Callable[[], object]) -> int:
    """Counts the bytecode instructions of `work`: its cost, independent of the machine's load."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> TraceFunction:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
