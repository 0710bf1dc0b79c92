"""Adapters of many rows in two launches, on a GPU or in the interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.reference.linear import LinearWeight
from quire.kernels.reference.low_rank import AdaptedRows, LowRankAddition
from quire.kernels.triton.low_rank import LowRankCut, add_low_rank_cut, cut_for
from quire.kernels.triton.single_row.row_linear import RowNorm, RowTile, row_linear, row_narrow_as_cut
from quire.kernels.triton.single_row.row_low_rank import row_low_rank
from quire.kernels.triton.single_row.row_narrow import Narrow
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.conftest import ON_GPU

NONE = -1
SMALL = LowRankCut(16, 16, 32, 3, 4)


def adapted(numbers, num_adapters, device, most=0):
    """Builds the mapping from the adapter number of every row; `most`: capacity."""
    of_rows = torch.tensor(numbers)
    order = torch.argsort(of_rows, stable=True)
    order = order[of_rows[order] != NONE].int()
    rows = AdaptedRows.none(most or len(numbers), num_adapters)
    rows.starts[1:] = torch.tensor([int((of_rows == number).sum()) for number in range(num_adapters)]).cumsum(0)
    rows.tokens[: len(order)], rows.numbers[: len(order)] = order, of_rows[order].int()
    return AdaptedRows(*(part.to(device) for part in (rows.starts, rows.tokens, rows.numbers)))


def update(device, dtype, in_features, sizes, ranks, *, gains=False):
    """Creates an adapter; `ranks`: per projection, 0 for unchanged ones."""
    pairs = [
        (
            (torch.randn(rank, in_features) / in_features**0.5).to(device, dtype),
            torch.randn(size, rank).to(device, dtype),
        )
        if rank
        else None
        for rank, size in zip(ranks, sizes, strict=True)
    ]
    return LowRankAddition(pairs, torch.rand(2, sum(sizes)).to(device) + 0.5 if gains else None)


def check(device, dtype, updates, in_features, sizes, numbers, cut=None):
    x = torch.randn(len(numbers), in_features).to(device, dtype)
    base = torch.randn(len(numbers), sum(sizes)).to(device, dtype)
    rows, result = adapted(numbers, len(updates), device), base.clone()
    most_rank = max(pair[0].size(0) for each in updates if each for pair in each.pairs if pair)
    packed = triton.prepare_low_rank(updates, in_features, sizes, dtype, most_rank=most_rank, device=device)
    add_low_rank_cut(x, result, packed, rows, cut=cut or cut_for(len(numbers)))
    wide = [
        each and replace(each, pairs=[pair and tuple(part.double() for part in pair) for pair in each.pairs])
        for each in updates
    ]
    want = base.double()
    reference.add_low_rank(x.double(), want, reference.prepare_low_rank(wide, in_features, sizes, torch.float64), rows)
    assert_close(result, want, slack=3)
    for row, number in enumerate(numbers):
        if number == NONE or updates[number] is None:
            assert torch.equal(result[row], base[row])


@pytest.mark.parametrize(
    ("in_features", "sizes", "ranks"),
    [
        (64, (48,), (8,)),
        (96, (128, 64, 64), (16, 16, 16)),
        (33, (140, 7), (5, 0)),
        (130, (40,), (64,)),
        (64, (24, 24), (256, 8)),
    ],
)
def test_each_row_gets_what_its_own_adapter_adds(dtype, device, in_features, sizes, ranks):
    """The batch mixes adapters of different ranks, one that does not adapt this layer, and rows without an adapter."""
    other = tuple(rank and rank + 3 for rank in ranks) if max(ranks) < 250 else ranks
    updates = [
        update(device, dtype, in_features, sizes, ranks),
        None,
        update(device, dtype, in_features, sizes, other, gains=True),
    ]
    numbers = [0, NONE, 2, 1, 0, 2, 2, 2, NONE, 0, 0, *[2] * 17]
    check(device, dtype, updates, in_features, sizes, numbers, SMALL)


@pytest.mark.parametrize("num_rows", [1, 9, 40])
def test_rows_of_many_adapters(device, num_rows):
    """There are more adapters than rows of a tile; most adapters have one row or none."""
    updates = [update(device, torch.float16, 64, (32,), (8,)) for _ in range(20)]
    numbers = [(7 * row) % 21 - 1 for row in range(num_rows)]
    check(device, torch.float16, updates, 64, (32,), numbers, SMALL)


@pytest.mark.parametrize("num_rows", [3, 600])
def test_all_tuned_cuts(device, num_rows):
    updates = [update(device, torch.float16, 256, (160, 32), (16, 16)) for _ in range(2)]
    check(device, torch.float16, updates, 256, (160, 32), [row % 3 - 1 for row in range(num_rows)])


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 16, 64, 256])
@pytest.mark.parametrize("num_rows", [1, 8, 256, 512, 3000])
def test_all_tuned_sizes(device, num_rows, rank):
    sizes = (4096, 1024, 1024)
    updates = [update(device, torch.bfloat16, 4096, sizes, (rank,) * 3) for _ in range(8)]
    check(device, torch.bfloat16, updates, 4096, sizes, [row % 9 - 1 for row in range(num_rows)])


def test_no_adapter_is_read_if_no_row_has_one(device):
    """Buffers have room for more rows than the batch, and those are not read either."""
    updates = [update(device, torch.float32, 32, (16,), (4,))]
    packed = triton.prepare_low_rank(updates, 32, (16,), torch.float32, most_rank=4, device=device)
    result = torch.ones(5, 16, device=device)
    nothing = torch.full((5, 32), float("nan"), device=device)
    triton.add_low_rank(nothing, result, packed, adapted([NONE] * 5, 1, device, most=100))
    assert torch.equal(result, torch.ones_like(result))


def test_adapters_are_replaced_in_place(device):
    """A recorded graph refers to the table of adapters and to the rows, both of which are updated in place."""
    updates = [update(device, torch.float32, 32, (16,), (rank,)) for rank in (4, 20)]
    packed = triton.prepare_low_rank([None, None], 32, (16,), torch.float32, most_rank=20, device=device)
    table, x, rows = packed.table.data_ptr(), torch.randn(3, 32).to(device), adapted([1, NONE, 1], 2, device)
    base = torch.zeros(3, 16, device=device)
    for there in (updates[0], updates[1], None):
        triton.put_low_rank(packed, 1, there)
        result, want = base.clone(), base.clone()
        triton.add_low_rank(x, result, packed, rows)
        reference.add_low_rank(x, want, reference.prepare_low_rank([None, there], 32, (16,), torch.float32), rows)
        torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-5)
        assert bool(result.any()) == (there is not None)
    assert packed.table.data_ptr() == table
    assert not packed.owners


@pytest.mark.parametrize("normed", [False, True])
def test_separate_launch_beside_a_4_bit_product(device, normed):
    """The result equals that beside a 16-bit product."""
    dtype, updates = torch.float16, [None, update(device, torch.float16, 256, (64,), (20,))]
    packed = triton.prepare_low_rank(updates, 256, (64,), dtype, most_rank=20, device=device)
    x, starts = torch.randn(1, 256).to(device, dtype), adapted([1], 2, device).starts
    norm = RowNorm(torch.randn(256).to(device, dtype), 1e-5) if normed else None
    beside, alone = (Narrow(packed, starts, torch.zeros(packed.most_ranks, device=device, dtype=dtype)) for _ in "ab")
    row_linear(x, LinearWeight(torch.randn(64, 256).to(device, dtype), None), norm=norm, narrow=beside)
    row_narrow_as_cut(x, alone, norm, pdl=False)
    assert torch.equal(beside.products, alone.products)
    assert beside.products[:20].all()
    assert not beside.products[20:].any()


@pytest.mark.parametrize(("rank", "hidden", "num_rows"), [(5, 48, 1), (20, 140, 27), (70, 33, 9), (16, 256, 600)])
def test_each_token_gets_what_its_own_adapter_adds_to_its_vector(dtype, device, rank, hidden, num_rows):
    """The batch mixes adapters of different ranks, one without embedding weights, and tokens without an adapter."""
    vocab_size = 77
    updates = [update(device, dtype, vocab_size, (hidden,), (given,)) for given in (rank, rank + 3)]
    updates.insert(1, None)
    numbers = [row % 4 - 1 for row in range(num_rows)] if num_rows > 1 else [2]
    ids = torch.randint(vocab_size, (num_rows,), dtype=torch.int32).to(device)
    rows, base = adapted(numbers, 3, device, most=num_rows + 7), torch.randn(num_rows, hidden).to(device, dtype)
    result, want = base.clone(), base.double()
    packed = triton.prepare_low_rank(updates, vocab_size, (hidden,), dtype, most_rank=rank + 3, device=device)
    triton.embed_low_rank(ids, result, packed, rows)
    wide = [each and replace(each, pairs=[tuple(p.double() for p in pair) for pair in each.pairs]) for each in updates]
    exact = reference.prepare_low_rank(wide, vocab_size, (hidden,), torch.float64)
    reference.embed_low_rank(ids, want, exact, rows)
    assert_close(result, want, slack=3)
    for row, number in enumerate(numbers):
        assert torch.equal(result[row], base[row]) == (number in {NONE, 1})


@pytest.mark.parametrize("num_rows", [1, 21])
def test_full_table_replaces_the_models_embeddings(dtype, device, num_rows):
    """With an identity matrix and gains of 0, the vectors equal the adapter's table bit for bit."""
    hidden, vocab_size = 140, 77
    table = torch.randn(vocab_size, hidden).to(device, dtype)
    whole = LowRankAddition(
        [(table.t(), torch.eye(hidden, device=device, dtype=dtype))], torch.zeros(2, hidden, device=device)
    )
    numbers = [(row + 1) % 3 - 1 for row in range(num_rows)]
    ids = torch.randint(vocab_size, (num_rows,), dtype=torch.int32).to(device)
    rows, base = adapted(numbers, 2, device), torch.randn(num_rows, hidden).to(device, dtype)
    updates = [whole, update(device, dtype, vocab_size, (hidden,), (20,))]
    packed = triton.prepare_low_rank(updates, vocab_size, (hidden,), dtype, most_rank=hidden, device=device)
    result = base.clone()
    triton.embed_low_rank(ids, result, packed, rows)
    for row, number in enumerate(numbers):
        if number != 1:
            assert torch.equal(result[row], base[row] if number == NONE else table[ids[row].long()])
        else:
            assert not torch.equal(result[row], base[row])


def test_steps_are_cut_by_how_many_rows_they_have():
    assert [cut_for(rows).rows for rows in (1, 64, 512, 513, 9000)] == [
        16,
        16,
        16,
        64,
        64,
    ]


@pytest.mark.parametrize("after", ["nothing", "gate", "residual"])
@pytest.mark.parametrize("number", [NONE, 0, 1, 2])
def test_a_single_row_in_the_chain(dtype, device, after, number):
    """Covers ranks of one tile, a larger rank with gains, an adapter without this layer, and no adapter."""
    in_features, sizes = 256, {"nothing": (64, 40), "gate": (96, 96), "residual": (256,)}[after]
    out, gated = sum(sizes), after == "gate"
    updates = [
        update(device, dtype, in_features, sizes, (8,) * len(sizes)),
        update(device, dtype, in_features, sizes, (70,) * len(sizes), gains=True),
        None,
    ]
    x, weight = torch.randn(1, in_features).to(device, dtype), torch.randn(out, in_features).to(device, dtype) / 16
    norm = RowNorm(torch.randn(in_features).to(device, dtype), 1e-5)
    residual = torch.randn(1, out).to(device, dtype) if after == "residual" else None
    rows = adapted([number], len(updates), device)
    packed = triton.prepare_low_rank(updates, in_features, sizes, dtype, most_rank=70, device=device)
    narrow = Narrow(packed, rows.starts, torch.full((packed.most_ranks,), float("nan"), device=device, dtype=dtype))
    before = None if residual is None else residual.double()
    shape = None if ON_GPU else RowTile(rows=64, chunk=256, ahead=1, warps=4)  # programs run one after the other
    y = row_linear(x, LinearWeight(weight, None), norm=norm, narrow=narrow, pdl=ON_GPU, shape=shape)
    got = row_low_rank(y, narrow, gated=gated, residual=residual, pdl=ON_GPU)
    normed = reference.rms_norm(x.double(), norm.weight.double(), norm.eps)
    want = normed @ weight.double().t()
    wide = [each and replace(each, pairs=[tuple(p.double() for p in pair) for pair in each.pairs]) for each in updates]
    reference.add_low_rank(normed, want, reference.prepare_low_rank(wide, in_features, sizes, torch.float64), rows)
    if gated:
        want = torch.nn.functional.silu(want[:, :96]) * want[:, 96:]
    assert_close(got, want if before is None else want + before, slack=4)
    assert residual is None or got is residual
