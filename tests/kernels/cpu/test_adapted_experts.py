"""Adapters of experts against the reference; rows keep their bits."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from quire.kernels.cpu.tape import Tape
from quire.kernels.reference.low_rank import AdaptedRows, ExpertAdditions
from tests.kernels.cpu.closeness import assert_close, needs_library
from tests.kernels.cpu.test_experts import choice, weights_of
from tests.kernels.cpu.test_low_rank import adapted, put, update

pytestmark = pytest.mark.skipif(**needs_library)

EXPERTS, HIDDEN, SIZE, TOP_K, ADAPTERS = 4, 33, 17, 2, 3


def updates_of(dtype):
    """Returns updates by adapter and expert for either product; the second adapter has none, the third skips two
    experts."""

    def one(number, expert, sizes, in_features):
        left_alone = number == 1 or (number == 2 and expert < 2)
        return None if left_alone else update((5 + number,) * len(sizes), sizes, in_features, dtype)

    pairs = [(number, expert) for number in range(ADAPTERS) for expert in range(EXPERTS)]
    return [one(*pair, (SIZE, SIZE), HIDDEN) for pair in pairs], [one(*pair, (HIDDEN,), SIZE) for pair in pairs]


def additions(package, updates, dtype, rows):
    gate_up, down = updates
    return ExpertAdditions(
        package.prepare_low_rank(gate_up, HIDDEN, (SIZE, SIZE), dtype),
        package.prepare_low_rank(down, SIZE, (HIDDEN,), dtype),
        rows,
    )


@pytest.mark.parametrize("rows", [1, 9, 600])
def test_tokens_get_what_their_own_adapters_add(dtype, rows):
    """The batch exceeds one tile, and one expert is on another rank; rows without an adapter keep their exact bits."""
    given, updates = weights_of(EXPERTS, HIDDEN, SIZE, dtype), updates_of(dtype)
    numbers = [row % 4 - 1 for row in range(rows)] if rows > 1 else [0]
    x, of_rows, (ids, weights) = torch.randn(rows, HIDDEN).to(dtype), adapted(numbers), choice(rows, EXPERTS, TOP_K)
    ids[rows // 2, 0] = -1
    packed = cpu.prepare_experts(*given)
    made = cpu.experts(x, ids, weights, packed, added=additions(cpu, updates, dtype, of_rows))
    without = cpu.experts(x, ids, weights, packed)
    exact = reference.prepare_experts(*[None if part is None else part.double() for part in given])
    wide = [
        [each and type(each)([tuple(p.double() for p in pair) for pair in each.pairs]) for each in part]
        for part in updates
    ]
    in_double = additions(reference, wide, torch.float64, of_rows)
    want = reference.experts(x.double(), ids, weights, exact, added=in_double)
    unit = 2.0**-6 if dtype is torch.bfloat16 else 2.0**-18
    assert_close(made, want, absolute=unit * (1 + float(want.abs().max())))
    for row, number in enumerate(numbers):
        assert torch.equal(made[row], without[row]) == (number in {-1, 1} or (number == 2 and ids[row].max() < 2))


def test_a_row_has_the_same_bits_in_any_batch(dtype):
    updates, packed = updates_of(dtype), cpu.prepare_experts(*weights_of(EXPERTS, HIDDEN, SIZE, dtype))
    numbers, x, (ids, weights) = [row % 4 - 1 for row in range(40)], torch.randn(40, HIDDEN).to(dtype), choice(40, 4, 2)
    whole = cpu.experts(x, ids, weights, packed, added=additions(cpu, updates, dtype, adapted(numbers)))
    for row in range(0, 40, 3):
        one = slice(row, row + 1)
        added = additions(cpu, updates, dtype, adapted(numbers[one]))
        alone = cpu.experts(x[one].contiguous(), ids[one].contiguous(), weights[one].contiguous(), packed, added=added)
        assert torch.equal(alone[0], whole[row]), row


def test_replays_read_current_rows_and_adapters(dtype):
    gate_up, down = updates_of(dtype)
    packed, rows, tape = cpu.prepare_experts(*weights_of(4, HIDDEN, SIZE, dtype)), AdaptedRows.none(9, 3), Tape(rows=9)
    added = additions(cpu, ([None] * 12, [None] * 12), dtype, rows)
    x, (ids, weights) = torch.randn(9, HIDDEN).to(dtype), choice(9, EXPERTS, TOP_K)
    with tape.recording():
        y = cpu.experts(x, ids, weights, packed, added=added)
    for there in (True, False):
        for place, pair in enumerate(zip(gate_up, down, strict=True)):
            for to, each in zip((added.gate_up, added.down), pair, strict=True):
                cpu.put_low_rank(to, place, each if there else None)
        for numbers in ([0, 1, -1, 2, 2], [-1, -1], [0] * 9):
            put(rows, numbers)
            count = len(numbers)
            tape.replay(rows=count)
            want = cpu.experts(x[:count], ids[:count], weights[:count], packed, added=added)
            assert torch.equal(y[:count], want)
            plain = cpu.experts(x[:count], ids[:count], weights[:count], packed)
            assert torch.equal(want, plain) == (not there or max(numbers) < 0)


def test_other_dtypes_go_to_the_reference():
    given, updates = weights_of(EXPERTS, HIDDEN, SIZE, torch.float16), updates_of(torch.float16)
    x, rows, (ids, weights) = torch.randn(3, HIDDEN).half(), adapted([0, -1, 2]), choice(3, EXPERTS, TOP_K)
    made, want = (
        package.experts(
            x, ids, weights, package.prepare_experts(*given), added=additions(package, updates, torch.float16, rows)
        )
        for package in (cpu, reference)
    )
    assert torch.equal(made, want)
