from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from tests.kernels.cpu.closeness import assert_close, needs_library
from tests.kernels.latents import NAN, latents, stored

pytestmark = pytest.mark.skipif(**needs_library)

ABSOLUTE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}  # as in test_attention.py, for longer keys


# heads, rank, rope, block_size
SHAPES = [(1, 16, 2, 1), (6, 24, 8, 4), (16, 512, 64, 16), (5, 33, 6, 7), (128, 64, 16, 64)]


@pytest.mark.parametrize(("heads", "rank", "rope", "block_size"), SHAPES)
def test_is_latent_attention(dtype, heads, rank, rope, block_size):
    case, scale = latents([1, 200, 64, 65, 131], heads, rank, rope, block_size, dtype), (rank + rope) ** -0.5
    # a first token, a decode, a whole prompt, a last chunk, a chunk that ends before the last token
    for rows in ([(0, 0, 1), (1, 199, 200)], [(0, 0, 1), (1, 199, 200), (2, 0, 64), (3, 30, 65), (4, 100, 130)]):
        got = cpu.latent_attention(*case.step(rows), scale)
        assert_close(got, case.exact(rows, scale), absolute=ABSOLUTE[dtype])


@pytest.mark.parametrize("heads", [6, 16, 128])
def test_row_has_the_same_bits_for_any_chunking(dtype, heads):
    """Chunk sizes, the number of threads and the number of rows, which decides how heads are split, all vary."""
    case = latents([150, 90], heads, 40, 8, 16, dtype)
    whole = cpu.latent_attention(*case.step([(0, 0, 150)]), 0.2)
    for chunk, threads in ((1, 1), (7, 2), (32, 5), (64, 2), (100, 1)):
        cpu.set_num_threads(threads)
        parts = []
        for begin in range(0, 150, chunk):
            end = min(begin + chunk, 150)
            step = case.step([(1, 3, 90), (0, begin, end), (1, 89, 90)])
            parts.append(cpu.latent_attention(*step, 0.2)[87 : 87 + end - begin])
        assert torch.equal(torch.cat(parts), whole), chunk
        alone = cpu.latent_attention(*case.step([(0, 149, 150)]), 0.2)
        assert torch.equal(alone, whole[149:])


def test_a_nan_stays_in_its_sequence(dtype):
    case = latents([70, 80], 8, 32, 8, 16, dtype)
    rows = [(0, 60, 70), (1, 70, 80)]
    clean = cpu.latent_attention(*case.step(rows), 0.2)
    case.q[0][65] = NAN
    got = cpu.latent_attention(*case.step(rows), 0.2)
    assert got[5].isnan().all()
    others = [i for i in range(20) if i != 5]
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize(("in_features", "out_features"), [(128, 512), (512, 128), (10, 24), (7, 5)])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_per_head_products(dtype, rows, in_features, out_features):
    weight = (in_features**-0.5 * torch.randn(6, out_features, in_features)).to(dtype)
    whole = torch.randn(rows, 6, in_features + 9).to(dtype)
    x = whole[..., 4 : 4 + in_features]
    packed = cpu.prepare_head_linear(weight)
    got = cpu.head_linear(x, packed)
    want = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    assert got.is_contiguous()
    assert_close(got, want, units=2, absolute=5e-6)
    assert torch.equal(got[-1:], cpu.head_linear(x[-1:], packed))
    assert_close(got, reference.head_linear(x, reference.prepare_head_linear(weight)), units=2, absolute=5e-6)


@pytest.mark.parametrize(("heads", "still", "rank", "rope"), [(1, 2, 5, 2), (6, 10, 24, 8), (16, 128, 512, 64)])
def test_storing_is_the_reference(dtype, heads, still, rank, rope):
    ours = stored(13, heads, still, rank, rope, dtype)
    theirs = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in ours.items()}
    cpu.latent_store(**ours)
    reference.latent_store(**theirs)
    assert_close(ours["q"], theirs["q"], units=6)
    assert_close(ours["cache"], theirs["cache"], units=6)


def test_other_dtypes_go_to_the_reference():
    case = latents([20], 4, 12, 4, 16, torch.float16)
    step = case.step([(0, 5, 20)])
    assert torch.equal(cpu.latent_attention(*step, 0.2), reference.latent_attention(*step, 0.2))
    ours = stored(5, 4, 6, 12, 4, torch.float32)
    ours["cache"] = ours["cache"].bfloat16()
    theirs = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in ours.items()}
    cpu.latent_store(**ours)
    reference.latent_store(**theirs)
    assert torch.equal(ours["cache"], theirs["cache"])
