from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from quire.kernels.reference.sampling.noise import gumbel_noise
from tests.kernels.cpu.closeness import needs_library

pytestmark = pytest.mark.skipif(**needs_library)

INF = float("inf")


def rows_of(num_rows: int, vocab_size: int, spread: float = 3.0):
    logits = spread * torch.randn(num_rows, vocab_size)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    positions = torch.randint(0, 2**31 - 1, (num_rows,), dtype=torch.int32)
    return logits, seeds, positions


def column(value, num_rows: int, dtype=torch.float32):
    return torch.full((num_rows,), value, dtype=dtype)


def scores(logits, temperature, seeds, positions):
    return logits / temperature.unsqueeze(1) + gumbel_noise(seeds, positions, logits.size(1))


def assert_same_choice(got, want, logits, temperature, seeds, positions):
    """Asserts the same token, or one with an equal noisy logit up to the last places."""
    noisy = scores(logits, temperature, seeds, positions)
    at_got, at_want = (noisy.gather(1, t.long().unsqueeze(1)).squeeze(1) for t in (got, want))
    torch.testing.assert_close(at_got, at_want, rtol=1e-6, atol=1e-6)
    assert (got != want).sum() <= 1 + got.numel() // 10_000


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 63, 64, 65, 1000, 4096, 32003])
def test_greedy_takes_the_lowest_of_the_most_likely(vocab_size):
    logits, seeds, positions = rows_of(50, vocab_size)
    logits = logits.round()  # many equal values
    want = logits.argmax(dim=1)
    first = (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1)
    assert torch.equal(cpu.sample(logits.clone(), None, None, None, None, seeds, positions), first.int())
    zero = column(0.0, 50)
    assert torch.equal(cpu.sample(logits.clone(), zero, None, None, None, seeds, positions), first.int())
    assert logits.gather(1, want.unsqueeze(1)).equal(logits.gather(1, first.unsqueeze(1)))


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(3000, 700), (200, 4096), (20, 32003), (4, 151_936)])
def test_sampling_is_the_reference(num_rows, vocab_size):
    logits, seeds, positions = rows_of(num_rows, vocab_size)
    temperature = 0.2 + 2 * torch.rand(num_rows)
    args = temperature, None, None, None, seeds, positions
    got, want = cpu.sample(logits.clone(), *args), reference.sample(logits.clone(), *args)
    assert got.dtype is torch.int32
    assert_same_choice(got, want, logits, temperature, seeds, positions)


@pytest.mark.parametrize("top_k", [None, 0, 1, 2, 20, 300, 100_000])
@pytest.mark.parametrize("top_p", [None, 0.0, 0.1, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [None, 0.0, 0.05])
def test_filters_are_the_reference(top_k, top_p, min_p):
    num_rows = 60
    for vocab_size, spread in ((1000, 3.0), (517, 0.5)):
        logits, seeds, positions = rows_of(num_rows, vocab_size, spread)
        logits[::3] = logits[::3].mul(2).round().div(2)  # rows with equal values
        logits[::7, 100:400] = -INF
        temperature = 0.5 + torch.rand(num_rows)
        args = (
            temperature,
            None if top_k is None else column(top_k, num_rows, torch.int32),
            None if top_p is None else column(top_p, num_rows),
            None if min_p is None else column(min_p, num_rows),
            seeds,
            positions,
        )
        got, want = cpu.sample(logits.clone(), *args), reference.sample(logits.clone(), *args)
        assert_same_choice(got, want, logits, temperature, seeds, positions)


def test_each_row_has_its_own_settings():
    num_rows = 400
    logits, seeds, positions = rows_of(num_rows, 3000)
    args = (
        torch.rand(num_rows) * (torch.rand(num_rows) > 0.3),
        torch.randint(-1, 50, (num_rows,), dtype=torch.int32),
        torch.rand(num_rows).clamp(max=0.999),
        torch.rand(num_rows) * 0.2,
        seeds,
        positions,
    )
    got, want = cpu.sample(logits.clone(), *args), reference.sample(logits.clone(), *args)
    assert (got != want).sum() <= 1


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99999])
def test_the_nucleus_of_a_large_vocabulary(top_p):
    """Covers peaked distributions with a few likely tokens, and flat ones with thousands of similar tokens."""
    for spread in (5.0, 0.01):
        logits, seeds, positions = rows_of(12, 50_000, spread)
        temperature = column(1.0, 12)
        args = temperature, None, column(top_p, 12), None, seeds, positions
        got, want = cpu.sample(logits.clone(), *args), reference.sample(logits.clone(), *args)
        assert_same_choice(got, want, logits, temperature, seeds, positions)


def test_frequencies_are_probabilities():
    num_rows, logits = 200_000, torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, -6.0, -INF])
    seeds = torch.arange(num_rows)
    got = cpu.sample(
        logits.repeat(num_rows, 1), column(1.0, num_rows), None, None, None, seeds, column(5, num_rows, torch.int32)
    )
    counts = torch.bincount(got.long(), minlength=7).double()
    expected = logits.double().softmax(0) * num_rows
    assert counts[6] == 0
    chi_square = ((counts - expected) ** 2 / expected)[:6].sum()
    assert chi_square < 25.7  # 5 degrees of freedom: exceeded by 1 in 10,000 correct samplers


def test_noise_is_the_reference_to_the_last_places():
    """With equal logits, the token with the largest noise is chosen, so that every token is chosen at some time."""
    num_rows, vocab_size = 4000, 97
    _, seeds, positions = rows_of(num_rows, vocab_size)
    args = column(1.0, num_rows), None, None, None, seeds, positions
    logits = torch.zeros(num_rows, vocab_size)
    got, want = cpu.sample(logits.clone(), *args), reference.sample(logits.clone(), *args)
    assert_same_choice(got, want, logits, args[0], seeds, positions)
    assert set(got.tolist()) == set(range(vocab_size))


@pytest.mark.parametrize("where", [0, 5, 98, 99])
def test_rows_without_candidates_are_marked_lost(where):
    logits, seeds, positions = rows_of(5, 100)
    logits[0, where] = float("nan")
    logits[1, where] = INF
    logits[2] = -INF
    logits[3, :where] = -INF
    for temperature in (None, column(0.0, 5), column(1.0, 5)):
        for filters in ((None, None, None), (column(3, 5, torch.int32), column(0.5, 5), column(0.1, 5))):
            if temperature is None and filters[0] is not None:
                continue
            got = cpu.sample(logits.clone(), temperature, *filters, seeds, positions)
            assert got[:3].tolist() == [-1, -1, -1]
            assert (got[3:] >= 0).all()


def test_one_allowed_token_is_taken():
    logits, seeds, positions = rows_of(40, 500)
    allowed = torch.arange(40) * 12
    kept = logits.gather(1, allowed.unsqueeze(1))
    logits.fill_(-INF).scatter_(1, allowed.unsqueeze(1), kept)
    for temperature in (None, column(1.0, 40)):
        for top_p in (None, column(0.5, 40)):
            if temperature is None and top_p is not None:
                continue
            got = cpu.sample(logits.clone(), temperature, None, top_p, None, seeds, positions)
            assert torch.equal(got, allowed.int())


def test_a_row_has_the_same_choice_in_any_batch_on_any_threads():
    logits, seeds, positions = rows_of(64, 5000)
    columns = column(0.8, 64), column(40, 64, torch.int32), column(0.95, 64), column(0.01, 64), seeds, positions
    cpu.set_num_threads(1)
    whole = cpu.sample(logits.clone(), *columns)
    cpu.set_num_threads(3)
    for rows in (slice(0, 64), slice(5, 6), slice(20, 50)):
        assert torch.equal(cpu.sample(logits[rows].clone(), *(c[rows] for c in columns)), whole[rows])


def test_float16_logits_go_to_the_reference():
    logits, seeds, positions = rows_of(5, 100)
    args = None, None, None, None, seeds, positions
    assert torch.equal(cpu.sample(logits.half(), *args), reference.sample(logits.half(), *args))
