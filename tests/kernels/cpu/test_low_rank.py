from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from quire.kernels.cpu.tape import Tape
from quire.kernels.reference.low_rank import AdaptedRows, LowRankAddition
from tests.kernels.cpu.closeness import assert_close, needs_library

pytestmark = pytest.mark.skipif(**needs_library)

NO_ADAPTER = -1


def update(ranks, sizes, in_features, dtype, *, gains=False):
    """Creates an adapter of concatenated projections."""
    pairs = [
        ((torch.randn(rank, in_features) / in_features**0.5).to(dtype), torch.randn(size, rank).to(dtype))
        for rank, size in zip(ranks, sizes, strict=True)
    ]
    return LowRankAddition(pairs, torch.rand(2, sum(sizes)) + 0.5 if gains else None)


def put(rows: AdaptedRows, numbers: list[int]) -> None:
    """Writes the adapter number of every row."""
    of_rows = torch.tensor(numbers, dtype=torch.int32)
    order = torch.argsort(of_rows, stable=True)
    order = order[of_rows[order] != NO_ADAPTER].int()
    ends = [int((of_rows <= number).sum() - (of_rows == NO_ADAPTER).sum()) for number in range(rows.num_adapters)]
    rows.starts[1:] = torch.tensor(ends)
    rows.tokens[: len(order)] = order
    rows.numbers[: len(order)] = of_rows[order]


def adapted(numbers: list[int], num_adapters: int = 3) -> AdaptedRows:
    rows = AdaptedRows.none(len(numbers), num_adapters)
    put(rows, numbers)
    return rows


SHAPES = [
    ((1,), (1,), 1),
    ((7, 7), (40, 33), 33),
    ((8, 8, 8), (128, 64, 64), 64),
    ((16,), (47,), 257),
    ((3,), (513,), 96),
]


@pytest.mark.parametrize("gains", [False, True])
@pytest.mark.parametrize(("ranks", "sizes", "in_features"), SHAPES)
def test_each_row_gets_what_its_own_adapter_adds(dtype, ranks, sizes, in_features, gains):
    """The batch mixes adapters of different ranks, one that does not adapt this layer, and rows without an adapter."""
    wide = tuple(rank + 9 for rank in ranks)
    updates = [update(ranks, sizes, in_features, dtype), None, update(wide, sizes, in_features, dtype, gains=gains)]
    weights = cpu.prepare_low_rank(updates, in_features, sizes, dtype)
    numbers = [0, -1, 2, 1, 0, 2, 2, 2, 2, 2, -1, 0, 0]
    x, base = torch.randn(len(numbers), in_features).to(dtype), torch.randn(len(numbers), sum(sizes)).to(dtype)
    result = base.clone()
    cpu.add_low_rank(x, result, weights, adapted(numbers))
    for row, number in enumerate(numbers):
        given = None if number == NO_ADAPTER else updates[number]
        if given is None:
            assert torch.equal(result[row], base[row])
            continue
        old, sums = base[row].double(), []
        if given.gains is not None:
            old = old * given.gains[0] + given.gains[1]
        for down, up in given.pairs:
            narrow = (x[row].float() @ down.float().T).to(dtype).double()
            sums.append((narrow @ up.double().T, float((narrow.abs() @ up.double().abs().T).max())))
        added, largest = torch.cat([added for added, _ in sums]), max(largest for _, largest in sums)
        unit = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-20  # a low-rank product may be rounded differently
        assert_close(result[row], old + added, absolute=unit * (1 + largest))


@pytest.mark.parametrize(("rank", "hidden", "vocab_size"), [(1, 1, 1), (7, 33, 211), (16, 64, 100), (40, 513, 33)])
def test_each_token_gets_what_its_own_adapter_adds_to_its_vector(dtype, rank, hidden, vocab_size):
    updates = [update((given,), (hidden,), vocab_size, dtype) for given in (rank, rank + 9)]
    weights = cpu.prepare_low_rank([updates[0], None, updates[1]], vocab_size, (hidden,), dtype)
    numbers = [0, -1, 2, 1, 0, 2, 2, 2, 2, 2, -1, 0, 0]
    ids = torch.randint(vocab_size, (len(numbers),), dtype=torch.int32)
    ids[-1] = vocab_size - 1
    base = torch.randn(len(numbers), hidden).to(dtype)
    result, want = base.clone(), base.double()
    cpu.embed_low_rank(ids, result, weights, adapted(numbers))
    wide = [LowRankAddition([tuple(part.double() for part in each.pairs[0])]) for each in updates]
    exact = reference.prepare_low_rank([wide[0], None, wide[1]], vocab_size, (hidden,), torch.float64)
    reference.embed_low_rank(ids, want, exact, adapted(numbers))
    unit = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-20
    for row, number in enumerate(numbers):
        if number in {-1, 1}:
            assert torch.equal(result[row], base[row])
        else:
            assert_close(result[row], want[row], absolute=unit * (1 + float(want[row].abs().max())))
            assert not torch.equal(result[row], base[row])


def test_full_table_replaces_the_models_embeddings(dtype):
    """With an identity matrix and gains of 0, the vectors equal the adapter's table bit for bit."""
    hidden, vocab_size, numbers = 33, 211, [0, -1, 1, 0]
    table, ids = torch.randn(vocab_size, hidden).to(dtype), torch.tensor([210, 3, 5, 0], dtype=torch.int32)
    whole = LowRankAddition([(table.t(), torch.eye(hidden, dtype=dtype))], torch.zeros(2, hidden))
    low = update((4,), (hidden,), vocab_size, dtype)
    for ops in (cpu, reference):
        weights = ops.prepare_low_rank([whole, low], vocab_size, (hidden,), dtype, most_rank=hidden)
        base = torch.randn(len(numbers), hidden).to(dtype)
        result = base.clone()
        ops.embed_low_rank(ids, result, weights, adapted(numbers))
        assert torch.equal(result[[0, 3]], table[[210, 0]])
        assert torch.equal(result[1], base[1])
        assert not torch.equal(result[2], base[2])


def test_embedding_adapter_equals_a_linear_one_on_one_hot_rows(dtype):
    """The references for vectors and for rows agree on the same adapter."""
    given, ids, rows = (
        update((5,), (24,), 33, dtype),
        torch.tensor([32, 0, 7], dtype=torch.int32),
        adapted([0, 0, -1], 1),
    )
    weights = reference.prepare_low_rank([given], 33, (24,), dtype)
    picked, multiplied = torch.zeros(2, 3, 24, dtype=dtype)
    reference.embed_low_rank(ids, picked, weights, rows)
    reference.add_low_rank(torch.nn.functional.one_hot(ids.long(), 33).to(dtype), multiplied, weights, rows)
    torch.testing.assert_close(picked, multiplied)
    assert picked[:2].any(1).all()
    assert not picked[2].any()


def test_conversion_of_adapter_numbers_to_rows():
    numbers = torch.tensor([2, -1, 0, 2, -1, 5, 0], dtype=torch.int32)
    rows = AdaptedRows.of(numbers, 6)
    assert rows.starts.tolist() == [0, 2, 2, 4, 4, 4, 5]
    assert rows.tokens[:5].tolist() == [2, 6, 0, 3, 5]
    assert rows.numbers[:5].tolist() == [0, 0, 2, 2, 5]
    assert rows.of_rows(7).tolist() == numbers.tolist()
    assert rows.of_rows(9).tolist() == [*numbers.tolist(), -1, -1]
    assert AdaptedRows.of(torch.full((3,), -1, dtype=torch.int32), 2).of_rows(3).tolist() == [-1] * 3


def test_a_row_has_the_same_bits_in_any_batch(dtype):
    updates = [update((16, 16), (96, 50), 130, dtype) for _ in range(3)]
    weights = cpu.prepare_low_rank(updates, 130, (96, 50), dtype)
    x, base = torch.randn(40, 130).to(dtype), torch.randn(40, 146).to(dtype)
    numbers = [int(number) for number in torch.arange(40) * 7 // 9 % 4 - 1]
    whole = base.clone()
    cpu.add_low_rank(x, whole, weights, adapted(numbers))
    for row, number in enumerate(numbers):
        alone = base[row : row + 1].clone()
        cpu.add_low_rank(x[row : row + 1].contiguous(), alone, weights, adapted([number]))
        assert torch.equal(alone[0], whole[row]), row


def test_threads_do_not_change_bits(dtype):
    weights = cpu.prepare_low_rank([update((64,), (2048,), 1024, dtype)] * 2, 1024, (2048,), dtype)
    x, base, before = torch.randn(50, 1024).to(dtype), torch.randn(50, 2048).to(dtype), cpu.num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            cpu.set_num_threads(threads)
            results.append(base.clone())
            cpu.add_low_rank(x, results[-1], weights, adapted([row % 2 for row in range(50)], 2))
    finally:
        cpu.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_replays_read_current_rows_and_adapters(dtype):
    updates = [update((4,), (24,), 32, dtype) for _ in range(2)]
    weights, weight = (
        cpu.prepare_low_rank(updates, 32, (24,), dtype),
        cpu.prepare_linear(torch.randn(24, 32).to(dtype), None),
    )
    x, rows, tape = torch.randn(9, 32).to(dtype), AdaptedRows.none(9, 2), Tape(num_tokens=9)
    with tape.recording():
        y = cpu.linear(x, weight)
        cpu.add_low_rank(x, y, weights, rows)
    for numbers in ([0, 1, -1, 1], [-1, -1], [1] * 9):
        put(rows, numbers)
        tape.replay(num_tokens=len(numbers))
        want = cpu.linear(x[: len(numbers)], weight)
        cpu.add_low_rank(x[: len(numbers)], want, weights, rows)
        assert torch.equal(y[: len(numbers)], want)


def test_replays_see_added_and_removed_adapters(dtype):
    weights = cpu.prepare_low_rank([None, None], 32, (24,), dtype)
    weight, later = cpu.prepare_linear(torch.randn(24, 32).to(dtype), None), update((4,), (24,), 32, dtype)
    x, rows, tape = torch.randn(3, 32).to(dtype), AdaptedRows.none(3, 2), Tape(num_tokens=3)
    with tape.recording():
        y = cpu.linear(x, weight)
        cpu.add_low_rank(x, y, weights, rows)
    put(rows, [1, 1, 1])
    plain = cpu.linear(x, weight)
    for there in (None, later, None):
        cpu.put_low_rank(weights, 1, there)
        tape.replay(num_tokens=3)
        want = plain.clone()
        cpu.add_low_rank(x, want, cpu.prepare_low_rank([None, there], 32, (24,), dtype), rows)
        assert torch.equal(y, want)
        assert torch.equal(y, plain) == (there is None)


def test_other_dtypes_go_to_the_reference():
    given = update((4,), (8,), 16, torch.float16)
    weights = cpu.prepare_low_rank([given], 16, (8,), torch.float16)
    x, result, want = torch.randn(2, 16).half(), torch.zeros(2, 8).half(), torch.zeros(2, 8).half()
    cpu.add_low_rank(x, result, weights, adapted([0, -1], 1))
    weights = reference.prepare_low_rank([given], 16, (8,), torch.float16)
    reference.add_low_rank(x, want, weights, adapted([0, -1], 1))
    assert torch.equal(result, want)
    assert result[0].any()
    assert not result[1].any()
