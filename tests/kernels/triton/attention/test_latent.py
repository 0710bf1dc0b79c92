from __future__ import annotations

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.reference.attention.kv_dtype import FP8, to_cache
from quire.kernels.triton.attention.latent_blocks import LatentTile, group_of, latent_chunk, latent_decode, splits_for
from tests.kernels.latents import Latents, Rows, latents, stored
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.conftest import ON_GPU
from tests.kernels.triton.tuned import tune

# heads, rank, rope, block_size
SHAPES = [(1, 16, 2, 4), (6, 24, 8, 16), (16, 512, 64, 64), (96, 40, 16, 64)]
DECODES: Rows = [(0, 0, 1), (1, 149, 150), (2, 63, 64), (3, 64, 65)]
MIXED: Rows = [(0, 0, 1), (1, 149, 150), (2, 0, 64), (3, 30, 65), (4, 100, 130)]


def step(case: Latents, rows: Rows, device: torch.device) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in case.step(rows)]


@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "chunks and rows together"])
@pytest.mark.parametrize(("heads", "rank", "rope", "block_size"), SHAPES)
def test_is_latent_attention(dtype, device, heads, rank, rope, block_size, rows):
    case, scale = latents([1, 150, 64, 65, 131], heads, rank, rope, block_size, dtype), (rank + rope) ** -0.5
    got = triton.latent_attention(*step(case, rows, device), scale)
    assert_close(got.cpu(), case.exact(rows, scale))


@pytest.mark.parametrize("tile", [LatentTile(16, 1, 4), LatentTile(64, 2, 8)])
def test_any_tile_size(device, tile):
    case = latents([70, 33], 16, 24, 8, 16, torch.float32)
    rows = [(0, 69, 70), (1, 32, 33)]
    q, rotated, cache, tables, _, lens = step(case, rows, device)
    assert_close(latent_decode(q, rotated, cache, tables, lens, 0.2, tile=tile).cpu(), case.exact(rows, 0.2))
    rows = [(0, 3, 70), (1, 32, 33)]
    assert_close(latent_chunk(*step(case, rows, device), 0.2, tile=tile).cpu(), case.exact(rows, 0.2))


def test_heads_form_equal_tiles_and_few_rows_are_split(monkeypatch):
    tune(monkeypatch, "attention.latent_blocks", enough_programs=132)
    assert [group_of(heads) for heads in (1, 6, 16, 40, 96, 128)] == [1, 6, 16, 40, 48, 64]
    assert [splits_for(*sizes) for sizes in ((1, 1), (8, 1), (64, 2), (512, 1))] == [32, 32, 2, 1]


def test_the_order_of_work_changes_nothing(device):
    case = latents([10, 90, 33], 4, 24, 8, 16, torch.float32)
    q, rotated, cache, tables, _, lens = step(case, [(0, 9, 10), (1, 89, 90), (2, 32, 33)], device)
    order = torch.tensor([1, 2, 0], dtype=torch.int32, device=device)
    plain, ordered = (latent_decode(q, rotated, cache, tables, lens, 0.2, given) for given in (None, order))
    assert torch.equal(plain, ordered)


def test_rows_beyond_the_batch_give_zeros(device):
    """A CUDA graph has a fixed number of rows; padding rows have length 0."""
    case = latents([10, 20], 4, 24, 8, 16, torch.float32)
    q, rotated, cache, tables, _, lens = step(case, [(0, 9, 10), (1, 19, 20)], device)
    want = latent_decode(q, rotated, cache, tables, lens, 0.2)
    lens[0] = 0
    got = latent_decode(q, rotated, cache, tables, lens, 0.2)
    assert not got[0].any()
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("num_padding", [0, 7, 90])
def test_a_step_in_a_larger_graph(device, num_padding):
    """Padding tokens are a prompt in the null block; padding rows have no tokens."""
    case = latents([40, 20, 70], 4, 24, 8, 16, torch.float32)
    case.cache[0] = 0.5
    rows = [(0, 39, 40), (1, 3, 20), (2, 0, 70)]
    q, rotated, cache, tables, start, lens = step(case, rows, device)
    total = q.size(0) + num_padding
    padded = [torch.randn(total, *t.shape[1:]).to(t) for t in (q, rotated)]
    for place, given in zip(padded, (q, rotated), strict=True):
        place[: q.size(0)] = given
    padded_tables = torch.zeros(9, 8, dtype=torch.int32, device=device)
    padded_tables[:3, : tables.size(1)] = tables
    padded_start = torch.full((10,), total, dtype=torch.int32, device=device)
    padded_start[:4] = start
    padded_lens = torch.zeros(9, dtype=torch.int32, device=device)
    padded_lens[:3], padded_lens[3] = lens, num_padding
    got = latent_chunk(*padded, cache, padded_tables, padded_start, padded_lens, 0.2)
    assert_close(got[: q.size(0)].cpu(), case.exact(rows, 0.2))
    assert got.isfinite().all()


def test_a_cache_of_8_bits(dtype, device):
    for rows in (DECODES, MIXED):
        case = latents([1, 150, 64, 65, 131], 6, 24, 8, 16, dtype)
        q, rotated, cache, *rest = step(case, rows, device)
        narrow = to_cache(cache, torch.empty(0, dtype=FP8))
        case.cache = narrow.to(dtype).cpu()
        for attention in (triton.latent_attention, reference.latent_attention):
            assert_close(attention(q, rotated, narrow, *rest, 0.2).cpu(), case.exact(rows, 0.2), slack=2)


@pytest.mark.parametrize(("heads", "still", "rank", "rope"), [(1, 2, 5, 2), (6, 10, 24, 8), (40, 128, 512, 64)])
def test_storing_is_the_reference(dtype, device, heads, still, rank, rope):
    given = stored(13, heads, still, rank, rope, dtype)
    ours, theirs = (
        {
            name: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()
        }
        for _ in range(2)
    )
    triton.latent_store(**ours)
    reference.latent_store(**theirs)
    for name in ("q", "cache"):
        assert_close(ours[name], theirs[name])
    untouched = torch.ones(63, dtype=torch.bool)
    untouched[given["slot_mapping"].long()] = False
    assert torch.equal(ours["cache"].view(63, -1).cpu()[untouched], given["cache"].view(63, -1)[untouched])


@pytest.mark.skipif(not ON_GPU, reason="cuBLAS writes between the heads of other rows")
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_per_head_products(dtype, device, rows):
    weight = (128**-0.5 * torch.randn(16, 512, 128)).to(device, dtype)
    x = torch.randn(rows, 16, 192).to(device, dtype)[..., :128]
    got = reference.head_linear(x, reference.prepare_head_linear(weight))
    assert got.is_contiguous()
    assert_close(got, torch.einsum("thi,hoi->tho", x.double(), weight.double()))
