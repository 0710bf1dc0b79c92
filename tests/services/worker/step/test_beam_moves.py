"""Beams that continue from other beams: blocks, tokens and records follow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from quire.services.worker.codec.step_codec import decode_plan
from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.checkpoints import RECURRENT_FAMILIES, Checkpoint
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New, ids_of
from tests.services.worker.replica.test_replica import expected, held
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
MAX_ERROR = 5e-5
MAX_ERROR_OF_STATES = 5e-4  # as tests/kv_groups/test_states.py says
BEAM = sampling_pb2.SamplingParams(temperature=0.0, logprobs=6, beam_search={"width": 3})


def candidates(result: pb.StepResult) -> list[tuple[list[int], list[float]]]:
    """Returns the candidates of each beam, best first."""
    ids, values = columns.i32(result.logprobs.token_ids), columns.f32(result.logprobs.logprobs)
    return [
        (row.tolist(), numbers.tolist())
        for row, numbers in zip(ids.reshape(-1, 7)[:, 1:], values.reshape(-1, 7)[:, 1:], strict=True)
    ]


class Search:
    """Three beams with their own record of tokens and blocks."""

    def __init__(self, rig: Rig, tokens: list[int]) -> None:
        self.rig, paper = rig, rig.scheduler
        rig.step([New(0, tokens, sampling=BEAM)], {0: len(tokens)})
        (ids, _), *_ = candidates(rig.last_result)
        blocks = rig.blocks(0)
        whole, part = divmod(len(tokens), 4)
        new = [
            New(slot, [*tokens, ids[slot]], len(tokens), blocks[:whole], blocks[whole] if part else 0, sampling=BEAM)
            for slot in (1, 2)
        ]
        plan = paper.plan(new, {0: 1, 1: 1, 2: 1})
        plan.beams.CopyFrom(moves([(0, 0, ids[0], *(0,) * paper.num_groups)]))
        paper.rows[0].tokens[-1] = ids[0]
        self.result = rig.execute(plan)
        paper.take(self.result)

    def go_on(self, wanted: list[tuple[int, int]]) -> None:
        """Moves beams by (slot, parent); children of a parent take its best tokens in order."""
        paper, found = self.rig.scheduler, candidates(self.result)
        before = {slot: (list(row.tokens[:-1]), list(row.blocks)) for slot, row in paper.rows.items()}
        taken = dict.fromkeys(range(3), 0)
        made, copies = [], []
        begins = paper.rows[0].num_computed % 4 == 0
        for slot, parent in wanted:
            token = found[parent][0][taken[parent]]
            taken[parent] += 1
            row, last = paper.rows[slot], (0,) * paper.num_groups
            row.tokens = [*before[parent][0], token]
            row.blocks = list(before[parent][1])
            if slot != parent and not begins:
                copied, row.blocks[-1] = row.blocks[-1], paper.take_block()
                last = ids_of(row.blocks[-1])
                copies += zip(ids_of(copied), last, strict=True)
            made.append((slot, parent, token, *last))
        plan = paper.plan(counts={0: 1, 1: 1, 2: 1})
        plan.beams.CopyFrom(moves(made))
        if copies:
            plan.copies.from_block_ids = columns.u32_bytes([source for source, _ in copies])
            plan.copies.to_block_ids = columns.u32_bytes([target for _, target in copies])
        self.result = self.rig.execute(plan)
        paper.take(self.result)


def moves(wanted: list[tuple[int, ...]]) -> pb.BeamMoves:
    """Builds moves from (slot, parent, token, last block of each KV group)."""
    slots, parents, tokens, *_ = (list(column) for column in zip(*wanted, strict=True))
    blocks = [block for move in wanted for block in move[3:]]
    return pb.BeamMoves(
        slots=columns.u32_bytes(slots),
        parents=columns.u32_bytes(parents),
        token_ids=columns.i32_bytes(tokens),
        last_block_ids=columns.u32_bytes(blocks),
    )


def check(search: Search, made: Checkpoint, max_error: float = MAX_ERROR) -> None:
    for slot, (ids, values) in enumerate(candidates(search.result)):
        row = made.logits(search.rig.tokens(slot)[:-1])[-1].log_softmax(0)
        assert ids == row.topk(6).indices.tolist()
        assert np.abs(np.array(values) - row[ids].numpy()).max() < max_error


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen2-windows", "mistral-window", "qwen3-next-narrow"])
@pytest.mark.parametrize("length", [7, 8, 10])
def test_candidates_of_each_beam(checkpoint: Make, length: int, family: str) -> None:
    made = checkpoint(family)
    search = Search(Rig(made.folder), prompt(length))
    most = MAX_ERROR_OF_STATES if family in RECURRENT_FAMILIES else MAX_ERROR
    check(search, made, most)
    for parents in ((0, 0, 2), (1, 1, 2), (0, 1, 2), (2, 2, 2), (0, 0, 0), (0, 1, 1)):
        search.go_on(list(enumerate(parents)))
        check(search, made, most)


def test_tokens_of_beams_are_recorded(checkpoint: Make) -> None:
    rig = Rig(checkpoint("llama").folder)
    search = Search(rig, prompt(6))
    for wanted in (
        [(0, 0), (1, 0), (2, 0)],
        [(0, 1), (1, 1), (2, 2)],
        [(0, 0), (1, 1), (2, 2)],
        [(0, 0), (1, 0), (2, 2)],
    ):
        search.go_on(wanted)
    on_record = {}
    for slot in range(3):
        on_record |= expected(rig.tokens(slot)[:-1], rig.blocks(slot), 11)
    assert {block: digest for block, digest in held(rig).items() if block in on_record} == on_record


def test_sampling_limits_apply_to_candidates(checkpoint: Make) -> None:
    rig = Rig(checkpoint("llama").folder, logprobs_mode="raw_logits")
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(BEAM)
    sampling.allowed_token_ids.extend([5, 9, 40])
    sampling.logit_bias[9] = 100.0
    rig.step([New(0, prompt(5), sampling=sampling)], {0: 5})
    (ids, values), *_ = candidates(rig.last_result)
    assert ids[0] == 9
    assert set(ids[:3]) == {5, 9, 40}
    assert values[0] == pytest.approx(0.0, abs=1e-5)
    assert values[3] == -np.inf


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ([(0, 1, 5, 0)], "only"),
        ([(0, 0, 5, 0), (1, 0, 5, 0)], "not of one length"),
        ([(0, 0, 5, 0), (2, 0, 5, 0)], "not live"),
        ([(1, 1, 5, 0), (0, 0, 5, 0)], "do not ascend"),
        ([(0, 0, 5, 128)], "last_block_ids"),
    ],
)
def test_invalid_moves_end_the_session(checkpoint: Make, wanted: list[tuple[int, int, int, int]], text: str) -> None:
    rig = Rig(checkpoint("llama").folder)
    rig.step([New(0, prompt(5), sampling=BEAM), New(1, prompt(3), sampling=BEAM)], {0: 5, 1: 3})
    plan = rig.scheduler.plan(counts={0: 1, 1: 1})
    plan.beams.CopyFrom(moves(wanted))
    with pytest.raises(PlanViolation, match=text), torch.inference_mode():
        rig.replica.launch(decode_plan(plan))
