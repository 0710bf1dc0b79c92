"""Drafts on recurrent states, by Triton's kernels and the reference: outputs equal token-by-token ones, and full blocks
hold the states after the known tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels import reference, triton
from quire.kernels.state_pages import StateShape
from quire.services.worker.attention.port import AttentionMetadata
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.layers.recurrent.recurrence import Recurrence, Rows, Tensors
from quire.services.worker.step.drafts.drafted_states import Array, StateLags, drafted_states
from quire.services.worker.step.drafts.drafts import DraftRows, Drafts
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32
from tests.kernels.states import BLOCK_SIZE, Layer, Sequence
from tests.kernels.triton.recurrent.test_recurrent import GRANITE, QWEN3_NEXT, SMALL

NUM_SLOTS, MOST = 9, 5  # maximum drafts of a slot


@dataclass
class Row:
    """Tokens of a sequence in one step."""

    slot: int
    count: int  # certain tokens
    right: int = 0  # accepted drafts, followed by rejected ones
    wrong: int = 0

    @property
    def num_drafts(self) -> int:
        return self.right + self.wrong

    @property
    def num_tokens(self) -> int:
        return self.count + self.num_drafts


class Drafting:
    """Layer with sequences in slots."""

    def __init__(self, layer: Layer, sequences: dict[int, Sequence]) -> None:
        self.layer, self.sequences, self.recurrence = layer, sequences, Recurrence()
        self.lags = np.zeros(NUM_SLOTS, dtype=np.int32)
        self.worst, self.num_kept, self.num_plain = 0.0, 0, 0

    def max_drafts(self, slot: int) -> int:
        """Returns the drafts allowed after one certain token: none at a block's last position or past the sequence's
        end."""
        row = self.sequences[slot]
        left = len(row.x) - row.num_computed - 1
        return max(0, min(MOST, BLOCK_SIZE - 2 - row.num_computed % BLOCK_SIZE, left))

    def step(self, rows: list[Row]) -> None:
        """Runs a step and checks the outputs, except after rejected drafts."""
        inputs = self._inputs(rows)
        given = tuple(torch.cat(parts) for parts in zip(*map(self._given, rows), strict=True))
        (found,) = self.recurrence.run(given, self._batch(rows, inputs), self._change)
        for row, outputs in zip(rows, found.split([row.num_tokens for row in rows]), strict=True):
            sequence, known = self.sequences[row.slot], row.count + row.right
            self.worst = max(self.worst, self.layer.error(sequence, sequence.num_computed, outputs[:known]))
            sequence.num_computed += known
            self.num_kept += int(self.lags[row.slot])
            self.lags[row.slot] = row.right
        self.num_plain += inputs.lags is None

    def _given(self, row: Row) -> Tensors:
        sequence = self.sequences[row.slot]
        span = slice(sequence.num_computed, sequence.num_computed + row.num_tokens)
        x, gates = sequence.x[span].clone(), torch.cat((sequence.strength[span], sequence.step[span]), dim=1)
        x[row.count + row.right :] += 1
        gates[row.count + row.right :] -= 2
        return x, gates

    def _inputs(self, rows: list[Row]) -> StepInputs:
        slots, counts = np.array([row.slot for row in rows]), _numbers([row.num_tokens for row in rows])
        drafts = _numbers([row.num_drafts for row in rows])
        lens = _numbers([self.sequences[row.slot].num_computed + row.num_tokens for row in rows])
        drafting = np.flatnonzero(drafts)
        found = Drafts(slots[drafting], drafts[drafting], np.zeros(drafts.sum(), np.int32))
        lags = StateLags(self.lags[slots], MOST, BLOCK_SIZE) if len(drafting) or self.lags[slots].any() else None
        nothing = np.zeros(0, np.int32)
        return StepInputs(
            slots=slots,
            token_ids=nothing,
            positions=nothing,
            slot_mapping=nothing,
            query_start=_numbers([0, *np.cumsum(counts)]),
            seq_lens=lens,
            num_blocks=-(-int(lens.max()) // BLOCK_SIZE),
            prev_sampled_tokens=nothing,
            prev_sampled_slots=slots[:0],
            sampling_slots=slots,
            sampling_tokens=nothing,
            sample_positions=nothing,
            rows_changed=False,
            drafts=DraftRows.of(slots, drafts, found) if len(drafting) else None,
            lags=lags,
        )

    def _batch(self, rows: list[Row], inputs: StepInputs) -> ForwardBatch:
        tables = np.zeros((len(rows), inputs.num_blocks), dtype=np.int32)
        for place, row in enumerate(rows):
            table = self.sequences[row.slot].table[: inputs.num_blocks]
            tables[place, : len(table)] = table
        block_tables, starts, lens = self._upload([tables, inputs.query_start, inputs.seq_lens])
        longest = max(row.num_tokens for row in rows)
        attention = AttentionMetadata(block_tables, starts, lens, max_query_len=longest, max_seq_len=1)
        drafted = drafted_states(inputs, NUM_SLOTS, self._upload)
        return ForwardBatch(starts, starts, starts, attention, None, drafted_states=drafted)

    def _upload(self, arrays: list[Array]) -> list[Tensor]:
        """Converts to int32, as data arrives on a GPU."""
        return [torch.from_numpy(array.astype(np.int32)).to(self.layer.device) for array in arrays]

    def _change(self, given: Tensors, rows: Rows) -> Tensors:
        layer, where = self.layer, (self.layer.pages, *rows, BLOCK_SIZE)
        strength, step = given[1].chunk(2, dim=1)
        qkv = layer.ops.short_convolution(given[0], layer.weight, *where, layer.conv_bias)
        if layer.delta:
            return (layer.ops.gated_delta_rule(qkv, strength, step, layer.rate, layer.bias, *where),)
        return (layer.ops.state_space_scan(qkv, step, layer.rate, layer.bias, *where),)


def _numbers(values: list[int]) -> I32:
    return np.array(values, dtype=np.int32)


def in_slots(layer: Layer) -> dict[int, Sequence]:
    """Assigns sequences to slots; the last one continues after two blocks of the first."""
    first, *others, last = (layer.sequence(length) for length in (54, 1, 37, 50))
    for name in ("x", "strength", "step"):
        getattr(last, name)[:32] = getattr(first, name)[:32]
    last.table[:2] = first.table[:2]
    return dict(zip((1, 2, 5, 7), (first, *others, last), strict=True))


def chosen(run: Drafting, slot: int, prompts: dict[int, int], choose: random.Random) -> Row:
    """Draws a part of the prompt, or a decode with or without drafts."""
    left = prompts[slot] - run.sequences[slot].num_computed
    if left > 0:
        return Row(slot, min(left, choose.randrange(1, 20)))
    drafts = choose.randrange(run.max_drafts(slot) + 1) if choose.random() < 0.8 else 0
    right = choose.randrange(drafts + 1)
    return Row(slot, 1, right, drafts - right)


def worst_of_random_steps(layer: Layer, seed: int) -> float:
    """Runs random steps that mix prompt chunks and decodes with and without drafts; returns the largest error."""
    choose, run = random.Random(seed), Drafting(layer, in_slots(layer))
    first, last = run.sequences[1], run.sequences[7]
    while unfinished := [slot for slot, row in run.sequences.items() if row.num_computed < len(row.x)]:
        if first.num_computed - run.lags[1] < 32 and 7 in unfinished:
            unfinished.remove(7)  # the blocks it continues from are not computed yet
        elif not last.num_computed:
            last.num_computed = 32
        prompts = {1: 18, 2: 1, 5: 3, 7: 34}
        rows = [chosen(run, slot, prompts, choose) for slot in unfinished if choose.random() < 0.8]
        if rows:
            run.step(rows)
    assert run.num_kept > 5
    check_full_blocks(run)
    return run.worst


def check_full_blocks(run: Drafting) -> None:
    """Compares full blocks with prompts computed whole."""
    layer = run.layer
    plain = Layer(reference, layer.shape, layer.dtype, delta=layer.delta)
    for slot, row in in_slots(plain).items():
        row.num_computed = 32 if slot == 7 else 0
        plain.compute([(row, len(row.x) - row.num_computed)])
        full = row.table[: len(row.x) // BLOCK_SIZE]
        assert full == run.sequences[slot].table[: len(full)]
        for found, expected in zip(_parts(layer), _parts(plain), strict=True):
            scale = expected[full].abs().max() if full and expected.numel() else 1.0
            bound = 1e-4 if layer.dtype == torch.float32 else 3e-2
            torch.testing.assert_close(found[full] / scale, expected[full] / scale, rtol=0, atol=bound)


def _parts(layer: Layer) -> tuple[Tensor, ...]:
    return layer.pages.inputs, *layer.pages.heads


@pytest.mark.parametrize(
    ("ops", "seed"),
    [(triton, 0), pytest.param(triton, 1, marks=pytest.mark.slow), *((reference, seed) for seed in range(6))],
)
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "space"])
def test_random_steps_with_drafts_equal_token_by_token(ops: ModuleType, delta: bool, seed: int) -> None:
    assert worst_of_random_steps(Layer(ops, SMALL, delta=delta), seed) < 5e-5


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "space"])
@pytest.mark.parametrize("count", [1, MOST, *(pytest.param(count, marks=pytest.mark.slow) for count in range(2, MOST))])
def test_accepted_drafts_update_the_state(count: int, delta: bool) -> None:
    """Each slot accepts another number of drafts; prompts of one token and more, and a decode, share the step."""
    layer, slots = Layer(triton, SMALL, delta=delta), range(count + 1)
    run = Drafting(layer, {slot: layer.sequence(20) for slot in slots} | {7: layer.sequence(45), 8: layer.sequence(12)})
    run.step([*(Row(slot, 1 + slot) for slot in slots), Row(8, 3)])
    run.step([*(Row(slot, 1, slot, count - slot) for slot in slots), Row(7, 20), Row(8, 1)])
    run.step([*(Row(slot, 1) for slot in slots), Row(7, 20), Row(8, 1, 1)])
    run.step([Row(0, 1), Row(8, 1)])
    run.step([*(Row(slot, 1) for slot in slots), Row(7, 1), Row(8, 1)])
    assert run.worst < 5e-5
    assert run.num_kept == sum(slots) + 1
    assert run.num_plain == 2, "the first, and the last, which is one of decodes alone"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "space"])
def test_random_steps_in_sizes_of_real_models_on_a_gpu(dtype: torch.dtype, delta: bool) -> None:
    shape: StateShape = QWEN3_NEXT if delta else GRANITE
    assert worst_of_random_steps(Layer(triton, shape, dtype, delta=delta), 3) < (
        1e-4 if dtype == torch.float32 else 2e-2
    )
