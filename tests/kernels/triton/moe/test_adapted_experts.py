"""Adapters of experts on a GPU, or in the interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.reference.low_rank import ExpertAdditions
from quire.kernels.routing import Routing
from quire.kernels.triton.moe.expert_layers import experts_in_tiles
from quire.kernels.triton.moe.grouped_linear import Tile
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.moe.test_experts import layer_of, normal
from tests.kernels.triton.test_low_rank import NONE, adapted, update

SMALL = Tile.even(16, 32, 32, 2, 4)
EXPERTS, HIDDEN, SIZE, ADAPTERS, MOST_RANK = 5, 64, 48, 3, 8


def additions(package, updates, dtype, rows, **options):
    gate_up, down = updates
    return ExpertAdditions(
        package.prepare_low_rank(gate_up, HIDDEN, (SIZE, SIZE), dtype, **options),
        package.prepare_low_rank(down, SIZE, (HIDDEN,), dtype, **options),
        rows,
    )


def updates_of(device, dtype):
    """Returns updates by adapter and expert for either product; the second adapter has none, the third skips two
    experts."""

    def one(number, expert, sizes, in_features):
        left_alone = number == 1 or (number == 2 and expert < 2)
        return None if left_alone else update(device, dtype, in_features, sizes, (5 + number,) * len(sizes))

    pairs = [(number, expert) for number in range(ADAPTERS) for expert in range(EXPERTS)]
    return [one(*pair, (SIZE, SIZE), HIDDEN) for pair in pairs], [one(*pair, (HIDDEN,), SIZE) for pair in pairs]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # interpreter warnings about padding rows
@pytest.mark.parametrize("num_rows", [1, 13])
def test_tokens_get_what_their_own_adapters_add(dtype, device, num_rows):
    """One expert is on another rank, and buffers have room for more rows than the batch."""
    packed, updates = layer_of(device, dtype, EXPERTS, HIDDEN, SIZE), updates_of(device, dtype)
    numbers = [row % 4 - 1 for row in range(num_rows)] if num_rows > 1 else [2]
    x, rows = normal(device, dtype, num_rows, HIDDEN), adapted(numbers, ADAPTERS, device, most=num_rows + 20)
    ids, weights = reference.route(normal(device, dtype, num_rows, EXPERTS), Routing(2))
    ids[num_rows // 2, 0] = -1
    load = torch.zeros(EXPERTS, dtype=torch.int64, device=device)
    added = additions(triton, updates, dtype, rows, most_rank=MOST_RANK, device=device)
    made = experts_in_tiles(x, ids, weights, packed, None, None, load, added, tile=SMALL)
    wide = [
        [each and replace(each, pairs=[tuple(p.double() for p in pair) for pair in each.pairs]) for each in part]
        for part in updates
    ]
    exact = reference.prepare_experts(packed.gate_up.double(), packed.down.double())
    want = reference.experts(x.double(), ids, weights, exact, added=additions(reference, wide, torch.float64, rows))
    plain = reference.experts(x.double(), ids, weights, exact)
    assert_close(made, want, slack=8)
    assert int(load.sum()) == int((ids >= 0).sum())
    assert not torch.equal(want, plain)
    for row, number in enumerate(numbers):
        if number in {NONE, 1}:
            assert torch.equal(want[row], plain[row])
