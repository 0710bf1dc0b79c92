from __future__ import annotations

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.reference.sampling.noise import gumbel_noise
from quire.kernels.triton.sampling.sampling import TUNING

INF = float("inf")


def rows_of(device, num_rows: int, vocab_size: int, spread: float = 3.0):
    logits = spread * torch.randn(num_rows, vocab_size)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,))
    positions = torch.randint(0, 2**31 - 1, (num_rows,), dtype=torch.int32)
    return logits.to(device), seeds.to(device), positions.to(device)


def column(device, value, num_rows: int, dtype=torch.float32):
    return None if value is None else torch.full((num_rows,), value, dtype=dtype, device=device)


def assert_same_choice(got, want, logits, temperature, seeds, positions):
    """Asserts the same token, or one with an equal noisy logit up to the last places."""
    assert got.dtype is torch.int32
    noisy = logits.float() / temperature.unsqueeze(1) + gumbel_noise(seeds, positions, logits.size(1))
    at_got, at_want = (noisy.gather(1, t.long().unsqueeze(1)).squeeze(1) for t in (got, want))
    torch.testing.assert_close(at_got, at_want, rtol=2e-6, atol=2e-6)
    assert (got != want).sum() <= 1 + got.numel() // 10_000


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 1000, 4096, 4097, 9000])
def test_greedy_takes_the_lowest_of_the_most_likely(device, vocab_size):
    logits, seeds, positions = rows_of(device, 8, vocab_size)
    logits = logits.round()  # many equal values
    first = (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1).int()
    zero, k = column(device, 0.0, 8), column(device, 5, 8, torch.int32)
    for columns in ((None, None), (zero, None), (zero, k)):
        assert torch.equal(triton.sample(logits.clone(), *columns, None, None, seeds, positions), first)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(40, 700), (7, 4096), (2, 32003)])
def test_sampling_is_the_reference(device, num_rows, vocab_size):
    logits, seeds, positions = rows_of(device, num_rows, vocab_size)
    temperature = (0.2 + 2 * torch.rand(num_rows)).to(device)
    args = temperature, None, None, None, seeds, positions
    got, want = triton.sample(logits.clone(), *args), reference.sample(logits.clone(), *args)
    assert_same_choice(got, want, logits, temperature, seeds, positions)


def test_many_rows_sample_as_few_do(device):
    """Bounds never exclude a token that could win: equal, spread and banned logits, greedy rows, rows of NaN."""
    num_rows, vocab_size = 3 * TUNING.here.least_bounded_rows, 9001
    logits, seeds, positions = rows_of(device, num_rows, vocab_size)
    logits[::4] = 0.25
    logits[1::4] *= 30
    logits[2::8, 100:] = -INF
    logits[3, 5], logits[7], logits[11, 4096] = float("nan"), -INF, INF
    temperature = (0.01 + 3 * torch.rand(num_rows)).to(device)
    temperature[::5] = 0.0
    args = temperature, None, None, None, seeds, positions
    together = triton.sample(logits, *args)
    apart = [triton.sample(*(t[i : i + 1] if torch.is_tensor(t) else t for t in (logits, *args))) for i in range(24)]
    assert torch.equal(together[:24], torch.cat(apart))
    assert together[[3, 7, 11]].tolist() == [-1, -1, -1]
    want = reference.sample(logits.clone(), *args)
    assert (together != want).sum() <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_read_as_they_are(device, dtype):
    logits, seeds, positions = rows_of(device, 6, 5000)
    logits = logits.to(dtype)
    temperature, k = column(device, 0.7, 6), column(device, 30, 6, torch.int32)
    for args in ((temperature, None, None, None), (temperature, k, None, None)):
        got = triton.sample(logits.clone(), *args, seeds, positions)
        want = reference.sample(logits.float(), *args, seeds, positions)
        assert_same_choice(got, want, logits, temperature, seeds, positions)


@pytest.mark.parametrize("top_k", [None, 1, 20, 300, 100_000])
@pytest.mark.parametrize("top_p", [None, 0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [None, 0.05])
def test_filters_are_the_reference(device, top_k, top_p, min_p):
    num_rows = 6
    for vocab_size, spread in ((500, 3.0), (1201, 0.5)):
        logits, seeds, positions = rows_of(device, num_rows, vocab_size, spread)
        logits[::3] = logits[::3].mul(2).round().div(2)  # rows with equal values
        logits[::2, 100:300] = -INF
        temperature = (0.5 + torch.rand(num_rows)).to(device)
        columns = column(device, top_k, num_rows, torch.int32), column(device, top_p, num_rows)
        args = temperature, *columns, column(device, min_p, num_rows), seeds, positions
        got, want = triton.sample(logits.clone(), *args), reference.sample(logits.clone(), *args)
        assert_same_choice(got, want, logits, temperature, seeds, positions)


def test_each_row_has_its_own_settings(device):
    num_rows = 24
    logits, seeds, positions = rows_of(device, num_rows, 3000)
    columns = (
        torch.rand(num_rows) * (torch.rand(num_rows) > 0.3),
        torch.randint(-1, 50, (num_rows,), dtype=torch.int32),
        torch.rand(num_rows).clamp(max=0.999),
        torch.rand(num_rows) * 0.2 * (torch.rand(num_rows) > 0.5),
    )
    args = *(c.to(device) for c in columns), seeds, positions
    got, want = triton.sample(logits.clone(), *args), reference.sample(logits.clone(), *args)
    assert torch.equal(got, want)


def test_rows_without_candidates_are_marked_lost(device):
    for where in (0, 57, 99):
        logits, seeds, positions = rows_of(device, 5, 100)
        logits[0, where] = float("nan")
        logits[1, where] = INF
        logits[2] = -INF
        logits[3, :where] = -INF
        filters = column(device, 3, 5, torch.int32), column(device, 0.5, 5), column(device, 0.1, 5)
        one = column(device, 1.0, 5)
        for args in ((None, None, None, None), (column(device, 0.0, 5), None, None, None), (one, *filters)):
            got = triton.sample(logits.clone(), *args, seeds, positions)
            assert got[:3].tolist() == [-1, -1, -1]
            assert (got[3:] >= 0).all()


def test_one_allowed_token_is_taken(device):
    logits, seeds, positions = rows_of(device, 6, 500)
    allowed = (torch.arange(6) * 83).to(device)
    kept = logits.gather(1, allowed.unsqueeze(1))
    logits.fill_(-INF).scatter_(1, allowed.unsqueeze(1), kept)
    one = column(device, 1.0, 6)
    for args in ((None, None), (one, None), (one, column(device, 0.5, 6))):
        got = triton.sample(logits.clone(), args[0], None, args[1], None, seeds, positions)
        assert torch.equal(got, allowed.int())


@pytest.mark.gpu
def test_a_large_vocabulary(device):
    logits, seeds, positions = rows_of(device, 64, 151_936, 1.0)
    temperature = (0.2 + 2 * torch.rand(64)).to(device)
    k, p = column(device, 50, 64, torch.int32), column(device, 0.9, 64)
    for filters in ((None, None), (k, None), (None, p), (k, p)):
        args = temperature, *filters, None, seeds, positions
        got, want = triton.sample(logits.clone(), *args), reference.sample(logits.clone(), *args)
        assert_same_choice(got, want, logits, temperature, seeds, positions)
