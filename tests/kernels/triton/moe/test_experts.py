"""Routing and experts on a GPU, or in the interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.routing import SILU, Gate, Routing
from quire.kernels.triton import batch_invariant
from quire.kernels.triton.moe.expert_layers import experts_in_tiles, group
from quire.kernels.triton.moe.grouped_linear import TUNING, Tile, most_tiles
from quire.kernels.triton.single_row.row_experts import RowExpertsTile, row_experts
from quire.kernels.triton.single_row.row_linear import RowNorm
from tests.kernels.triton import ordered_dot
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.conftest import ON_GPU
from tests.kernels.triton.tuned import tune

ROUTINGS = {
    "mixtral": (8, Routing(2)),
    "not-normalised": (5, Routing(3, renormalize=False)),
    "many": (60, Routing(8)),
    "sigmoid-groups": (16, Routing(4, scoring="sigmoid", scale=2.5, num_groups=4, top_groups=2, group_top=2)),
    "softmax-groups": (12, Routing(3, renormalize=False, scale=16.0, num_groups=3, top_groups=2)),
}
SMALL = Tile.even(16, 32, 32, 2, 4)


def normal(device, dtype, *shape):
    return torch.randn(shape).to(device, dtype)


def layer_of(device, dtype, num_experts, hidden, size, *, biased=False, gate=SILU):
    gate_up = normal(device, dtype, num_experts, 2 * size, hidden) / hidden**0.5
    down = normal(device, dtype, num_experts, hidden, size) / size**0.5
    biases = [normal(device, dtype, num_experts, n) if biased else None for n in (2 * size, hidden)]
    return triton.prepare_experts(gate_up, down, *biases, gate)


def exact(x, ids, weights, packed, *added):
    def wide(tensor):
        return None if tensor is None else tensor.double()

    of = reference.prepare_experts(
        *map(wide, (packed.gate_up, packed.down, packed.gate_up_bias, packed.down_bias)), packed.gate
    )
    return reference.experts(x.double(), ids, weights, of, *map(wide, added))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routes_as_the_reference_does(dtype, device, name, biased):
    num_experts, routing = ROUTINGS[name]
    logits = normal(device, dtype, 13, num_experts)
    bias = normal(device, torch.float32, num_experts) / 4 if biased else None
    ids, weights = triton.route(logits, routing, bias)
    want_ids, want_weights = reference.route(logits, routing, bias)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")  # of the interpreter
@pytest.mark.parametrize("name", ROUTINGS)
def test_nan_logits_still_choose_experts(device, name):
    num_experts, routing = ROUTINGS[name]
    ids, weights = triton.route(torch.full((2, num_experts), float("nan"), device=device), routing)
    assert all(len(set(row)) == routing.top_k and set(row) <= set(range(num_experts)) for row in ids.tolist())
    assert weights.isnan().all()


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 4, 2), (9, 4, 4), (70, 16, 3), (33, 5, 1)])
def test_every_pair_is_in_a_tile_of_its_expert(device, num_tokens, num_experts, top_k, rows):
    ids, _ = reference.route(torch.randn(num_tokens, num_experts).to(device) ** 3, Routing(top_k))
    load = torch.ones(num_experts, dtype=torch.int64, device=device)
    found = group(ids, num_experts, load, Tile.even(rows, 64, 64, 2, 4))
    assert found.tiles.size(1) == most_tiles(ids.numel(), num_experts, rows)
    listed = {expert: [] for expert in range(num_experts)}
    for expert, first, count in found.tiles.T.tolist():
        if expert >= 0:
            assert 0 < count <= rows
            listed[expert] += found.table[expert, first : first + count].tolist()
    flat = ids.flatten()
    for expert, pairs in listed.items():
        assert sorted(pairs) == (flat == expert).nonzero().flatten().tolist()
    assert (load - 1).tolist() == [len(pairs) for pairs in listed.values()]


@pytest.mark.parametrize("name", ["plain", "biased", "shared", "gated-shared"])
@pytest.mark.parametrize(("num_tokens", "hidden", "size"), [(1, 64, 32), (11, 48, 40), (40, 33, 70)])
def test_computes_as_the_reference_does(dtype, device, monkeypatch, num_tokens, hidden, size, name):
    tune(monkeypatch, "moe.grouped_linear", tiles={1 << 30: SMALL}, float32=SMALL)
    gate = Gate(limit=1.5, alpha=1.702) if name == "biased" else SILU
    packed = layer_of(device, dtype, 6, hidden, size, biased=name == "biased", gate=gate)
    x = normal(device, dtype, num_tokens, hidden)
    chosen = reference.route(torch.randn(num_tokens, 6).to(device), Routing(3))
    shared = normal(device, dtype, num_tokens, hidden) if "shared" in name else None
    shared_gate = normal(device, dtype, num_tokens, 1) if "gated" in name else None
    got = triton.experts(x, *chosen, packed, shared, shared_gate)
    assert_close(got, exact(x, *chosen, packed, shared, shared_gate), slack=3)


@pytest.mark.parametrize(("num_tokens", "hidden", "size"), [(1, 64, 32), (40, 96, 64), (21, 64, 40)])
def test_tma_loads_whole_tiles(device, num_tokens, hidden, size):
    """TMA loads weights of whole tiles, and the rows between the two products if these are whole tiles."""
    dtype = torch.float16
    packed = layer_of(device, dtype, 6, hidden, size, biased=True)
    x = normal(device, dtype, num_tokens, hidden)
    chosen = reference.route(torch.randn(num_tokens, 6).to(device), Routing(3))
    chosen[0][0, 0] = -1  # on another rank
    got = experts_in_tiles(x, *chosen, packed, None, None, None, tile=replace(SMALL, copied=True))
    assert_close(got, exact(x, *chosen, packed), slack=3)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TUNING.here.tiles.values(), ids=str)
def test_all_tuned_tiles(tile):
    device, dtype = torch.device("cuda"), torch.bfloat16
    packed = layer_of(device, dtype, 32, 2048, 768)
    for num_tokens in (2, 100, 1000):
        x = normal(device, dtype, num_tokens, 2048)
        chosen = reference.route(torch.randn(num_tokens, 32).to(device), Routing(8))
        got = experts_in_tiles(x, *chosen, packed, None, None, None, tile=tile)
        assert_close(got, exact(x, *chosen, packed), slack=3)


def test_unused_experts_are_not_read(device):
    packed = layer_of(device, torch.float32, 4, 32, 48)
    x = normal(device, torch.float32, 5, 32)
    ids = torch.tensor([[0, 2]] * 5, dtype=torch.int32, device=device)
    weights = torch.full((5, 2), 0.5, device=device)
    before = triton.experts(x, ids, weights, packed)
    packed.gate_up[[1, 3]], packed.down[[1, 3]] = float("nan"), float("nan")
    assert torch.equal(triton.experts(x, ids, weights, packed), before)


def test_a_row_has_the_same_bits_in_any_batch(device, monkeypatch):
    if not ON_GPU:
        ordered_dot.use(monkeypatch)
    packed = layer_of(device, torch.float16, 5, 70, 48)
    x = normal(device, torch.float16, 90, 70)
    ids, weights = reference.route(torch.randn(90, 5).to(device), Routing(2))
    whole = batch_invariant.experts(x, ids, weights, packed)
    assert_close(whole, exact(x, ids, weights, packed), slack=3)
    for first, rows in ((0, 1), (89, 1), (3, 8), (7, 64)):
        part = slice(first, first + rows)
        assert torch.equal(batch_invariant.experts(x[part], ids[part], weights[part], packed), whole[part])


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize(("hidden", "size"), [(256, 64), (1280, 43)])
def test_single_row_computes_its_chosen_experts(dtype, device, hidden, size, name):
    num_experts, routing = ROUTINGS[name]
    packed = layer_of(device, dtype, num_experts, hidden, size)
    residual, norm = normal(device, dtype, 1, hidden), RowNorm(normal(device, dtype, hidden), 1e-5)
    logits, load = normal(device, dtype, 1, num_experts), torch.zeros(num_experts, dtype=torch.int64, device=device)
    normed = reference.rms_norm(residual.double(), norm.weight.double(), norm.eps)
    ids, weights = reference.route(logits, routing)
    want = residual.double() + exact(normed, ids, weights, packed)
    shape = None if ON_GPU else RowExpertsTile(up=32, down=64)  # the interpreter runs programs one after the other
    row_experts(residual, norm, logits, routing, packed, load, pdl=ON_GPU, shape=shape)
    assert_close(residual, want, slack=3)
    assert load.nonzero().flatten().tolist() == sorted(ids[0].tolist())


def test_pairs_without_an_expert_are_left_out(dtype, device):
    x, ids, weights, packed, want, load = _partly_here(device, dtype)
    got = triton.experts(x, ids, weights, triton.prepare_experts(*packed), load=load)
    assert_close(got, want)
    assert load.tolist() == [int((ids == expert).sum()) for expert in range(3)]


def _partly_here(device, dtype):
    """Creates a layer with the first three of six experts; a token has none of them. Expected: the others contribute
    0."""
    all_packed = [torch.randn(6, 64, 32), torch.randn(6, 32, 32)]
    x, ids = torch.randn(5, 32).to(device, dtype), torch.tensor([[0, 5], [3, 4], [2, 1], [4, 0], [1, 2]]).int()
    weights = torch.rand(5, 2).to(device)
    packed = [weight.to(device, dtype) for weight in all_packed]
    here = torch.where(ids < 3, ids, -1).to(device)
    zeroed = weights * (here >= 0)
    want = reference.experts(
        x.double(), ids.to(device), zeroed, reference.prepare_experts(*(w.double() for w in packed))
    )
    return x, here, weights, [w[:3] for w in packed], want, torch.zeros(3, dtype=torch.int64, device=device)
