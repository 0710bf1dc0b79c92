"""Sequences that continue in a copy of a partly filled block of another sequence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import error, prompt
from tests.services.worker.plans import New
from tests.services.worker.replica.test_replica import expected, held
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
MAX_ERROR = 5e-5


def drawn(seed: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=1.5, seed=seed)


@pytest.mark.parametrize("later", [0, 1, 3])
def test_copies_continue_as_if_they_had_computed_the_prompt(checkpoint: Make, later: int) -> None:
    """Includes copies taken after the first sequence has written further tokens to its block."""
    made, tokens = checkpoint("qwen3-tied"), prompt(10)
    rig = Rig(made.folder)
    rig.step([New(0, tokens, sampling=drawn(0))], {0: 10})
    for _ in range(later):
        rig.step()
    blocks = rig.blocks(0)
    new = [New(slot, tokens, cached_blocks=blocks[:2], copied_block=blocks[2], sampling=drawn(slot)) for slot in (1, 2)]
    rig.step(new)
    for _ in range(9):
        rig.step()
    assert len({tuple(rig.tokens(slot)) for slot in range(3)}) == 3
    for slot in range(3):
        assert error(rig, made, slot) < MAX_ERROR
    first = {rig.blocks(slot)[:2] for slot in range(3)}
    assert len(first) == 1
    third = [rig.blocks(slot)[2] for slot in range(3)]
    assert len(set(third)) == 3


def test_tokens_of_copies_are_recorded(checkpoint: Make) -> None:
    tokens = prompt(10)
    rig = Rig(checkpoint("llama").folder)
    rig.step([New(0, tokens, sampling=drawn(0))], {0: 10})
    blocks = rig.blocks(0)
    rig.step([New(1, tokens, cached_blocks=blocks[:2], copied_block=blocks[2], sampling=drawn(1))])
    for _ in range(6):
        rig.step()
    both = expected(rig.tokens(0), rig.blocks(0), 17) | expected(rig.tokens(1), rig.blocks(1), 16)
    assert held(rig) == both


def test_a_copy_is_used_as_far_as_the_texts_are_the_same(checkpoint: Make) -> None:
    made, tokens = checkpoint("qwen3-tied"), prompt(11)
    rig = Rig(made.folder)
    rig.step([New(0, tokens)], {0: 11})
    rig.step()
    blocks, other = rig.blocks(0), [*tokens[:9], 5, 6, 7, 8]
    rig.step([New(1, other, cached_blocks=blocks[:2], copied_block=blocks[2], num_cached=9)], {1: 4})
    for _ in range(6):
        rig.step()
    assert error(rig, made, 0) < MAX_ERROR
    assert error(rig, made, 1) < MAX_ERROR
    both = expected(rig.tokens(0), rig.blocks(0), 18) | expected(rig.tokens(1), rig.blocks(1), 19)
    assert held(rig) == both


def test_sequence_continues_in_the_block_of_a_finished_one(checkpoint: Make) -> None:
    made, tokens = checkpoint("qwen3-tied"), prompt(10)
    rig = Rig(made.folder)
    rig.step([New(0, tokens)], {0: 10})
    blocks, said = rig.blocks(0), rig.tokens(0)
    rig.step()  # leaves one more token than is used
    other = [*said[:10], 5, 6, 7, 8]
    rig.step([New(1, other, cached_blocks=blocks, num_cached=10)], {1: 4}, released=[0])
    for _ in range(6):
        rig.step()
    assert rig.blocks(1)[:3] == blocks
    assert error(rig, made, 1) < MAX_ERROR
    assert held(rig) == expected(rig.tokens(1), rig.blocks(1), 20)


@torch.inference_mode()
def test_steps_with_copies_may_be_launched_before_earlier_ones_are_recorded(checkpoint: Make) -> None:
    tokens = prompt(10)
    rig = Rig(checkpoint("llama").folder)
    paper = rig.scheduler
    plans = [paper.plan([New(0, tokens)], {0: 10})]
    blocks = paper.rows[0].blocks
    plans.append(paper.plan([New(1, tokens, cached_blocks=tuple(blocks[:2]), copied_block=blocks[2])]))
    plans += [paper.plan() for _ in range(6)]
    flights = [rig.replica.launch(decode_plan(plan)) for plan in plans]
    for flight in flights:
        outcome = flight.launch.wait()
        rig.replica.record(flight, outcome)
        paper.take(encode_result(flight.result(outcome, wait_us=0)))
    assert rig.tokens(0)[:-1] == rig.tokens(1)
    both = expected(rig.tokens(0), rig.blocks(0), 17) | expected(rig.tokens(1), rig.blocks(1), 16)
    assert held(rig) == both


@pytest.mark.parametrize(
    ("sources", "targets"), [([1], [0]), ([1], [128]), ([1, 2], [3]), ([1, 3], [3, 4]), ([1, 2], [3, 3])]
)
def test_invalid_copies_end_the_session(checkpoint: Make, sources: list[int], targets: list[int]) -> None:
    rig = Rig(checkpoint("llama").folder)
    plan = rig.scheduler.plan([New(0, prompt(3))], {0: 3})
    copies = pb.BlockCopies(from_block_ids=columns.u32_bytes(sources), to_block_ids=columns.u32_bytes(targets))
    plan.copies.CopyFrom(copies)
    with pytest.raises(PlanViolation, match="copies"):
        rig.replica.launch(decode_plan(plan))
