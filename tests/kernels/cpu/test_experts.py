"""Routing and experts against the reference; rows keep their bits; experts without tokens are not read."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from quire.kernels.routing import Gate, Routing
from tests.kernels.cpu.closeness import assert_close, needs_library

pytestmark = pytest.mark.skipif(**needs_library)

ROUTINGS = {
    "mixtral": Routing(2),
    "not-normalised": Routing(3, renormalize=False),
    "sigmoid-groups": Routing(4, scoring="sigmoid", scale=2.5, num_groups=4, top_groups=2, group_top=2),
    "softmax-groups": Routing(3, renormalize=False, scale=16.0, num_groups=4, top_groups=2),
}
SHAPES = [(4, 32, 48), (8, 33, 17), (16, 64, 96)]  # experts, hidden, intermediate


def weights_of(num_experts: int, hidden: int, size: int, dtype: torch.dtype, *, bias: bool = False):
    gate_up = torch.randn(num_experts, 2 * size, hidden).to(dtype) / hidden**0.5
    down = torch.randn(num_experts, hidden, size).to(dtype) / size**0.5
    if not bias:
        return gate_up, down, None, None
    return gate_up, down, torch.randn(num_experts, 2 * size).to(dtype), torch.randn(num_experts, hidden).to(dtype)


def choice(rows: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.route(torch.randn(rows, num_experts), Routing(top_k))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routes_as_the_reference_does(dtype, name, biased):
    logits = torch.randn(37, 16).to(dtype)
    bias = torch.randn(16) / 4 if biased else None
    ids, weights = cpu.route(logits, ROUTINGS[name], bias)
    want_ids, want_weights = reference.route(logits, ROUTINGS[name], bias)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=1e-7)


def test_equal_logits_choose_the_lower_numbers(dtype):
    ids, weights = cpu.route(torch.zeros(2, 6, dtype=dtype), Routing(3))
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_nan_logits_still_choose_experts(dtype):
    for name, routing in ROUTINGS.items():
        ids, weights = cpu.route(torch.full((3, 8), float("nan"), dtype=dtype), routing)
        assert all(len(set(row)) == routing.top_k and set(row) <= set(range(8)) for row in ids.tolist()), name
        assert weights.isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 600])
@pytest.mark.parametrize("shape", SHAPES)
def test_computes_as_the_reference_does(dtype, shape, rows):
    num_experts, hidden, _size = shape
    biased = rows % 2 == 0
    weights = weights_of(*shape, dtype, bias=biased)
    gate = Gate(limit=1.5, alpha=1.702) if biased else Gate()
    x, chosen = torch.randn(rows, hidden).to(dtype), choice(rows, num_experts, 2)
    exact = reference.experts(x.double(), *chosen, reference.prepare_experts(*doubled(weights), gate))
    got = cpu.experts(x, *chosen, cpu.prepare_experts(*weights, gate))
    units = 4 if dtype is torch.float32 else 3  # rounded after each product and after the gate
    assert_close(got, exact, units=units, absolute=float(exact.abs().max()) * 2e-2 if units == 3 else 1e-5)


def doubled(tensors):
    return [None if tensor is None else tensor.double() for tensor in tensors]


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_is_added(dtype, gated):
    packed = cpu.prepare_experts(*weights_of(4, 32, 48, dtype))
    x, chosen, shared = torch.randn(9, 32).to(dtype), choice(9, 4, 2), torch.randn(9, 32).to(dtype)
    gate = torch.randn(9, 1).to(dtype) if gated else None
    want = cpu.experts(x, *chosen, packed).float() + shared.float() * (gate.float().sigmoid() if gated else 1)
    assert_close(cpu.experts(x, *chosen, packed, shared, gate), want.to(dtype), units=3)


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(dtype):
    packed = cpu.prepare_experts(*weights_of(8, 96, 65, dtype))
    x, (ids, weights) = torch.randn(1100, 96).to(dtype), choice(1100, 8, 3)
    cpu.set_num_threads(2)
    whole = cpu.experts(x, ids, weights, packed)
    for threads, rows in ((1, 1), (3, 2), (2, 9), (1, 300), (5, 1099)):
        cpu.set_num_threads(threads)
        for first in (0, 511, 1100 - rows):
            part = slice(first, first + rows)
            assert torch.equal(cpu.experts(x[part], ids[part], weights[part], packed), whole[part])


def test_unused_experts_are_not_read(dtype):
    gate_up, down, _, _ = weights_of(4, 32, 48, dtype)
    x, ids = torch.randn(5, 32).to(dtype), torch.tensor([[0, 2]] * 5, dtype=torch.int32)
    weights = torch.full((5, 2), 0.5)
    before = cpu.experts(x, ids, weights, cpu.prepare_experts(gate_up, down))
    gate_up[[1, 3]], down[[1, 3]] = float("nan"), float("nan")
    assert torch.equal(cpu.experts(x, ids, weights, cpu.prepare_experts(gate_up, down)), before)


def test_the_load_is_counted(dtype):
    packed = cpu.prepare_experts(*weights_of(4, 32, 48, dtype))
    ids, weights = choice(700, 4, 2)
    load = torch.ones(4, dtype=torch.int64)
    cpu.experts(torch.randn(700, 32).to(dtype), ids, weights, packed, load=load)
    assert (load - 1).tolist() == torch.bincount(ids.flatten(), minlength=4).tolist()


def test_no_rows(dtype):
    packed = cpu.prepare_experts(*weights_of(4, 32, 48, dtype))
    ids, weights = cpu.route(torch.empty(0, 4, dtype=dtype), Routing(2))
    assert cpu.experts(torch.empty(0, 32, dtype=dtype), ids, weights, packed).shape == (0, 32)


@pytest.mark.parametrize("rows", [1, 70])
def test_pairs_without_an_expert_are_left_out(dtype, rows):
    """The first three of eight experts are on this rank; the first token is routed to none of them."""
    gate_up, down, *_ = weights_of(8, 32, 48, dtype)
    ids, weights = choice(rows, 8, 2)
    ids[0] = torch.tensor([5, 7])
    here, load = torch.where(ids < 3, ids, -1), torch.zeros(3, dtype=torch.int64)
    x = torch.randn(rows, 32).to(dtype)
    want = cpu.experts(x, ids, weights * (here >= 0), cpu.prepare_experts(gate_up, down))
    got = cpu.experts(x, here, weights, cpu.prepare_experts(gate_up[:3], down[:3]), load=load)
    assert torch.equal(got, want)
    assert not got[0].any()
    assert load.tolist() == [int((here == expert).sum()) for expert in range(3)]
