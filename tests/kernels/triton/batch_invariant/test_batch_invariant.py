"""A row has the same bits alone, in any batch and in any chunk."""

from __future__ import annotations

import itertools

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.reference.linear import LinearWeight
from quire.kernels.triton import batch_invariant
from quire.kernels.triton.batch_invariant import attention as module
from tests.kernels.triton import ordered_dot
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.conftest import ON_GPU
from tests.kernels.triton.paged import Case
from tests.kernels.triton.sampling.test_sampling import assert_same_choice, rows_of
from tests.kernels.triton.tuned import tune

# q heads, kv heads, head_dim, block_size, window, dtype
CASES = [
    (6, 2, 16, 4, 0, torch.float32),
    (6, 2, 16, 4, 50, torch.float32),
    (2, 1, 80, 32, 0, torch.float16),
    (5, 1, 64, 64, 70, torch.float16),
    (1, 1, 256, 256, 0, torch.float32),
    pytest.param(32, 8, 128, 64, 0, torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(32, 8, 128, 64, 70, torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(16, 8, 128, 16, 0, torch.bfloat16, marks=pytest.mark.gpu),
]
LENGTH = 150
Chunks = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, "batch_invariant.attention", span=64)
    if not ON_GPU:
        ordered_dot.use(monkeypatch)


def of_sequence(case: Case, chunks: Chunks, window: int, company: list[tuple[int, int, int]]) -> torch.Tensor:
    """Computes sequence 1 in chunks [begin, end), each with `company` in the same step."""
    found = []
    for begin, end in chunks:
        before, behind = ([row for row in company if (row[0] < 1) is first] for first in (True, False))
        skipped = sum(stop - start for _, start, stop in before)
        out = batch_invariant.paged_attention(*case.step([*before, (1, begin, end), *behind]), case.scale, window)
        found.append(out[skipped : skipped + end - begin])
    return torch.cat(found)


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size", "window", "dtype"), CASES)
def test_attention(device, monkeypatch, q_heads, kv_heads, head_dim, block_size, window, dtype):
    case = Case([40, LENGTH, 130], (q_heads, kv_heads), head_dim, block_size, dtype, device)
    whole = of_sequence(case, [(0, LENGTH)], window, [])
    assert_close(whole, case.exact([(1, 0, LENGTH)], window))
    cuts = [(0, 7), (7, 8), (8, 70), (70, LENGTH)]
    assert torch.equal(of_sequence(case, cuts, window, [(0, 39, 40), (2, 60, 130)]), whole)
    company = [(0, 20, 21), (2, 129, 130)]
    for position, programs in itertools.product((0, 64, LENGTH - 1), (0, 1 << 20)):
        tune(
            monkeypatch, "batch_invariant.attention", enough_programs=programs
        )  # one for all spans of a row; one for each
        beside = [] if programs else company
        alone = of_sequence(case, [(position, position + 1)], window, beside)
        assert torch.equal(alone[0], whole[position])


@pytest.mark.parametrize("window", [0, 50])
def test_sinks_take_their_share(device, monkeypatch, window):
    case = Case([40, LENGTH, 130], (6, 2), 16, 4, torch.float32, device)
    sinks = torch.linspace(-3, 4, 6).to(device)
    rows = [(1, 0, LENGTH), (0, 39, 40)]
    whole = batch_invariant.paged_attention(*case.step(rows), case.scale, window, sinks)
    assert_close(whole, reference.paged_attention(*case.step(rows), case.scale, window, sinks))
    for programs in (0, 1 << 20):  # one for all spans of a row; one for each
        tune(monkeypatch, "batch_invariant.attention", enough_programs=programs)
        alone = batch_invariant.paged_attention(*case.step([(1, LENGTH - 1, LENGTH)]), case.scale, window, sinks)
        assert torch.equal(alone[0], whole[LENGTH - 1])


def test_rows_see_their_own_chunk_only(device, monkeypatch):
    """The chunk begins in the middle of a span."""
    case, rows = Case([40, LENGTH], (6, 2), 16, 4, torch.float32, device), [(1, 60, LENGTH), (0, 39, 40)]
    whole = batch_invariant.paged_attention(*case.step(rows), case.scale, 50, chunked=True)
    assert_close(whole, case.exact(rows, 50, chunked=True))
    for programs in (0, 1 << 20):  # one for all spans of a row; one for each
        tune(monkeypatch, "batch_invariant.attention", enough_programs=programs)
        last = case.step([(1, LENGTH - 1, LENGTH)])
        alone = batch_invariant.paged_attention(*last, case.scale, 50, chunked=True)
        assert torch.equal(alone[0], whole[LENGTH - 61])


def test_scores_are_capped(device, monkeypatch):
    case, rows = Case([40, LENGTH, 130], (6, 2), 16, 4, torch.float32, device), [(1, 0, LENGTH), (0, 39, 40)]
    whole = batch_invariant.paged_attention(*case.step(rows), case.scale, 0, None, 2.0)
    assert_close(whole, reference.paged_attention(*case.step(rows), case.scale, 0, None, 2.0))
    for programs in (0, 1 << 20):  # one for all spans of a row; one for each
        tune(monkeypatch, "batch_invariant.attention", enough_programs=programs)
        last = case.step([(1, LENGTH - 1, LENGTH)])
        alone = batch_invariant.paged_attention(*last, case.scale, 0, None, 2.0)
        assert torch.equal(alone[0], whole[LENGTH - 1])


def test_the_order_of_work_and_rows_without_a_sequence_change_nothing(device):
    case = Case([10, 90, 133], (4, 2), 32, 16, torch.float32, device)
    q, k, v, tables, _, lens = case.step([(0, 9, 10), (1, 89, 90), (2, 132, 133)])
    order = torch.tensor([1, 2, 0], dtype=torch.int32, device=device)
    plain, ordered = (module.decode_attention(q, k, v, tables, lens, case.scale, 0, o) for o in (None, order))
    assert torch.equal(plain, ordered)
    lens[0] = 0
    padded = module.decode_attention(q, k, v, tables, lens, case.scale, 0)
    assert not padded[0].any()
    assert torch.equal(padded[1:], plain[1:])


def test_sequences_without_rows_are_skipped(device):
    """Such sequences occur as padding behind the rows of a chunk in a CUDA graph."""
    case = Case([40, 70], (4, 2), 32, 16, torch.float32, device)
    q, k, v, tables, start, lens = case.step([(0, 5, 40), (1, 0, 70)])
    want = batch_invariant.paged_attention(q, k, v, tables, start, lens, case.scale, 0)
    start = torch.cat((start, start[-1:], start[-1:]))
    tables, lens = torch.cat((tables, tables)), torch.cat((lens, torch.zeros_like(lens)))
    assert torch.equal(batch_invariant.paged_attention(q, k, v, tables, start, lens, case.scale, 0), want)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 5), (130, 96), (200, 257)])
def test_linear(dtype, device, out_features, in_features, bias):
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(device, dtype)
    packed = LinearWeight(weight, torch.randn(out_features).to(device, dtype) if bias else None)
    x = torch.randn(150, in_features).to(device, dtype)
    whole = batch_invariant.linear(x, packed)
    exact = x.double() @ weight.double().T
    assert_close(whole, exact if packed.bias is None else exact + packed.bias.double())
    for first, rows in ((0, 1), (1, 1), (149, 1), (3, 8), (60, 17), (7, 64), (20, 65), (0, 128)):
        assert torch.equal(batch_invariant.linear(x[first : first + rows], packed), whole[first : first + rows])
    assert batch_invariant.linear(x[:0], packed).shape == (0, out_features)


@pytest.mark.parametrize("size", [1, 33, 600])
def test_log_softmax(device, monkeypatch, size):
    tune(monkeypatch, "batch_invariant.log_softmax", block=256)
    logits = (4 * torch.randn(5, size)).to(device)
    logits[1, : size // 2] = -float("inf")
    got = batch_invariant.log_softmax(logits)
    torch.testing.assert_close(got, reference.log_softmax(logits), rtol=2e-6, atol=2e-6)
    for row in range(5):
        assert torch.equal(batch_invariant.log_softmax(logits[row : row + 1]), got[row : row + 1])


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
def test_log_softmax_passes_nan_on(device):
    logits = torch.zeros(2, 9, device=device)
    logits[0, 3] = float("nan")
    got = batch_invariant.log_softmax(logits)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()


def test_samples_do_not_depend_on_other_rows(device, monkeypatch):
    tune(monkeypatch, "sampling.filtered_sampling", block=256)
    logits, seeds, positions = rows_of(device, 9, 300)
    temperature = torch.full((9,), 0.8, device=device)
    plain = batch_invariant.sample(logits.clone(), temperature, None, None, None, seeds, positions)
    want = reference.sample(logits.clone(), temperature, None, None, None, seeds, positions)
    assert_same_choice(plain, want, logits, temperature, seeds, positions)
    top_k, top_p = torch.zeros(9, dtype=torch.int32, device=device), torch.ones(9, device=device)
    top_k[5], top_p[6] = 3, 0.5
    mixed = batch_invariant.sample(logits.clone(), temperature, top_k, top_p, None, seeds, positions)
    others = [row for row in range(9) if row not in (5, 6)]
    assert torch.equal(mixed[others], plain[others])
    greedy = batch_invariant.sample(logits.half(), None, None, None, None, seeds, positions)
    assert torch.equal(greedy, logits.half().float().argmax(dim=1).int())


def test_inherited_kernels_use_one_program_per_row(device):
    x, residual = torch.randn(9, 96).to(device), torch.randn(9, 96).to(device)
    weight = torch.randn(96).to(device)
    normed, gated = triton.rms_norm(x, weight, 1e-6), triton.silu_mul(x)
    added = triton.add_rms_norm(x, residual.clone(), weight, 1e-6)
    for row in range(9):
        one = slice(row, row + 1)
        assert torch.equal(triton.rms_norm(x[one], weight, 1e-6), normed[one])
        assert torch.equal(triton.silu_mul(x[one]), gated[one])
        assert torch.equal(triton.add_rms_norm(x[one], residual[one].clone(), weight, 1e-6), added[one])
