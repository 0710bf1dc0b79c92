from __future__ import annotations

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.triton.attention.decode_attention import decode_attention, splits_for
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.paged import NAN, Case
from tests.kernels.triton.tuned import tune

# q heads, kv heads, head_dim, block_size
SHAPES = [
    (6, 2, 16, 4),
    (5, 1, 64, 64),
    (2, 2, 8, 16),
    (2, 1, 80, 32),
    (3, 1, 96, 128),
    (8, 2, 128, 64),
    (2, 1, 256, 256),
]


@pytest.mark.parametrize("window", [0, 1, 50])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_decode(dtype, device, q_heads, kv_heads, head_dim, block_size, window):
    case = Case([1, 200, 64, 65], (q_heads, kv_heads), head_dim, block_size, dtype, device)
    rows = [(0, 0, 1), (1, 199, 200), (2, 63, 64), (3, 64, 65)]
    got = triton.paged_attention(*case.step(rows), case.scale, window)
    assert_close(got, case.exact(rows, window))


@pytest.mark.parametrize("window", [0, 1, 50])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_chunks_and_rows_together(dtype, device, q_heads, kv_heads, head_dim, block_size, window):
    case = Case([1, 150, 64, 65, 131], (q_heads, kv_heads), head_dim, block_size, dtype, device)
    # a first token, a decode, a whole prompt, a last chunk, a chunk that ends before the last token
    rows = [(0, 0, 1), (1, 149, 150), (2, 0, 64), (3, 30, 65), (4, 100, 130)]
    got = triton.paged_attention(*case.step(rows), case.scale, window)
    assert_close(got, case.exact(rows, window))


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size"), [(6, 2, 16, 4), (8, 2, 64, 64)])
def test_sinks_take_their_share(dtype, device, q_heads, kv_heads, head_dim, block_size, window):
    case = Case([1, 150, 64, 65], (q_heads, kv_heads), head_dim, block_size, dtype, device)
    sinks = torch.linspace(-3, 4, q_heads).to(device)
    for rows in ([(0, 0, 1), (1, 149, 150), (2, 63, 64)], [(0, 0, 1), (1, 149, 150), (2, 0, 64), (3, 30, 65)]):
        step = case.step(rows)
        got = triton.paged_attention(*step, case.scale, window, sinks)
        wide = [t.double().float() if t.is_floating_point() else t for t in step]
        assert_close(got, reference.paged_attention(*wide, case.scale, window, sinks))


@pytest.mark.parametrize("window", [0, 50])
def test_scores_are_capped(dtype, device, window):
    case = Case([1, 150, 64, 65], (6, 2), 32, 16, dtype, device)
    for rows in ([(0, 0, 1), (1, 149, 150), (2, 63, 64)], [(0, 0, 1), (1, 149, 150), (2, 0, 64), (3, 30, 65)]):
        step = case.step(rows)
        got, plain = (triton.paged_attention(*step, 2 * case.scale, window, None, cap) for cap in (2.0, 0.0))
        wide = [t.double().float() if t.is_floating_point() else t for t in step]
        assert_close(got, reference.paged_attention(*wide, 2 * case.scale, window, None, 2.0))
        assert (got - plain).abs().max() > 0.01


@pytest.mark.parametrize("chunk", [1, 20, 64])
def test_rows_see_their_own_chunk_only(dtype, device, chunk):
    """Covers steps with rows of several chunks."""
    case = Case([1, 70, 64, 65], (6, 2), 16, 4, dtype, device)
    for rows in ([(0, 0, 1), (1, 69, 70), (2, 63, 64), (3, 64, 65)], [(0, 0, 1), (1, 69, 70), (3, 15, 65)]):
        got = triton.paged_attention(*case.step(rows), case.scale, chunk, chunked=True)
        assert_close(got, case.exact(rows, chunk, chunked=True))


def test_splits_fill_the_gpu_and_large_batches_have_none(monkeypatch):
    tune(monkeypatch, "attention.decode_attention", enough_programs=512)
    assert [splits_for(num_seqs, 8) for num_seqs in (1, 4, 8, 16, 32, 64, 512)] == [32, 16, 8, 4, 2, 1, 1]


def test_the_order_of_work_changes_nothing(device):
    case = Case([10, 90, 33], (4, 2), 32, 16, torch.float32, device)
    rows = [(0, 9, 10), (1, 89, 90), (2, 32, 33)]
    q, k, v, tables, _, lens = case.step(rows)
    order = torch.tensor([1, 2, 0], dtype=torch.int32, device=device)
    plain, ordered = (decode_attention(q, k, v, tables, lens, case.scale, 0, o) for o in (None, order))
    assert torch.equal(plain, ordered)


def test_rows_beyond_the_batch_give_zeros(device):
    """A CUDA graph has a fixed number of rows; padding rows have length 0."""
    case = Case([10, 20], (4, 2), 32, 16, torch.float32, device)
    q, k, v, tables, _, lens = case.step([(0, 9, 10), (1, 19, 20)])
    want = decode_attention(q, k, v, tables, lens, case.scale, 0)
    lens[0] = 0
    got = decode_attention(q, k, v, tables, lens, case.scale, 0)
    assert not got[0].any()
    assert torch.equal(got[1], want[1])


def test_sequences_without_rows_are_skipped(device):
    case = Case([40, 20, 70], (4, 2), 32, 16, torch.float32, device)
    rows = [(0, 5, 40), (2, 0, 70)]
    q, k, v, tables, start, lens = case.step(rows)
    start = torch.cat((start[:2], start[1:], start[-1:]))
    tables, lens = (torch.cat((t[:1], t[:1], t[1:], t[:1])) for t in (tables, lens))
    got = triton.paged_attention(q, k, v, tables, start, lens, case.scale, 0)
    assert_close(got, case.exact(rows))


@pytest.mark.parametrize("num_padding", [0, 7, 90])
def test_a_step_in_a_larger_graph(dtype, device, num_padding):
    """Padding tokens are a prompt in the null block; padding rows have no tokens."""
    case = Case([40, 20, 70], (4, 2), 32, 16, dtype, device)
    case.paged.k_cache[0] = case.paged.v_cache[0] = 0.5
    rows = [(0, 39, 40), (1, 3, 20), (2, 0, 70)]
    q, k, v, tables, start, lens = case.step(rows)
    total, width = q.size(0) + num_padding, 8
    padded_q = torch.randn(total, *q.shape[1:]).to(q)
    padded_q[: q.size(0)] = q
    padded_tables = torch.zeros(9, width, dtype=torch.int32, device=device)
    padded_tables[:3, : tables.size(1)] = tables
    padded_start = torch.full((10,), total, dtype=torch.int32, device=device)
    padded_start[:4] = start
    padded_lens = torch.zeros(9, dtype=torch.int32, device=device)
    padded_lens[:3], padded_lens[3] = lens, num_padding
    got = triton.paged_attention(padded_q, k, v, padded_tables, padded_start, padded_lens, case.scale, 0)
    assert torch.equal(got[: q.size(0)], triton.paged_attention(q, k, v, tables, start, lens, case.scale, 0))
    assert_close(got[: q.size(0)], case.exact(rows))
    assert got.isfinite().all()


def test_blocks_before_the_window_may_be_gone(dtype, device):
    """They may belong to other sequences by now, and their entries in the block table may be the null block."""
    case = Case([150], (4, 2), 32, 16, dtype, device)
    for rows in ([(0, 149, 150)], [(0, 130, 150)]):
        before = triton.paged_attention(*case.step(rows), case.scale, 20)
        table = case.paged.tables[0]
        gone = (rows[0][1] - 20 + 1) // 16
        kept = list(table)
        for block in table[:gone]:
            case.paged.k_cache[block] = case.paged.v_cache[block] = NAN
        table[:gone] = [0] * gone
        assert torch.equal(triton.paged_attention(*case.step(rows), case.scale, 20), before)
        case = Case([150], (4, 2), 32, 16, dtype, device)
        assert len(kept) == len(case.paged.tables[0])


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
def test_a_nan_stays_in_its_sequence(dtype, device):
    case = Case([70, 80], (4, 2), 32, 16, dtype, device)
    rows = [(0, 60, 70), (1, 70, 80)]
    clean = triton.paged_attention(*case.step(rows), case.scale, 0)
    case.paged.q[0][65] = NAN
    got = triton.paged_attention(*case.step(rows), case.scale, 0)
    assert got[5].isnan().all()
    others = [i for i in range(20) if i != 5]
    assert torch.equal(got[others], clean[others])


def test_large_scores_do_not_overflow(dtype, device):
    case = Case([100], (2, 1), 64, 16, dtype, device)
    case.paged.q[0] *= 1000
    for rows in ([(0, 0, 100)], [(0, 99, 100)]):
        got = triton.paged_attention(*case.step(rows), case.scale, 0)
        assert_close(got, case.exact(rows), slack=10)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (28, 4)])
def test_long_sequences(device, heads, block_size):
    """Sequences span enough tiles to rotate all buffers; covers splits, TMA and pointers."""
    case = Case([3000, 1, 777, 2048, 4100], heads, 128, block_size, torch.bfloat16, device)
    decode = [(0, 2999, 3000), (1, 0, 1), (2, 776, 777), (3, 2047, 2048), (4, 4099, 4100)]
    mixed = [(0, 1000, 3000), (1, 0, 1), (2, 776, 777), (3, 0, 2048), (4, 4000, 4100)]
    for rows in (decode, decode[:1], mixed):
        for window in (0, 1000):
            got = triton.paged_attention(*case.step(rows), case.scale, window)
            assert_close(got, case.exact(rows, window))
