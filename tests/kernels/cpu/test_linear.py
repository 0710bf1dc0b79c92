from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from tests.kernels.cpu.closeness import assert_close, needs_library

pytestmark = pytest.mark.skipif(**needs_library)

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 64)


def layer(out_features: int, in_features: int, dtype: torch.dtype, bias: bool = False):
    weight = torch.randn(out_features, in_features).to(dtype) / in_features**0.5
    return weight, torch.randn(out_features).to(dtype) if bias else None


def slack(in_features: int) -> float:
    """Returns the tolerance of sums of in_features float32 products of about 1 / sqrt(in_features)."""
    return 4e-7 * in_features**0.5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(1, 1), (7, 5), (16, 2), (40, 33), (47, 64), (130, 257), (256, 768), (513, 96)]
)
def test_is_the_product_for_odd_shapes(dtype, out_features, in_features, bias):
    weight, offset = layer(out_features, in_features, dtype, bias)
    packed = cpu.prepare_linear(weight, offset)
    for rows in ROWS:
        x = torch.randn(rows, in_features).to(dtype)
        exact = x.double() @ weight.double().T + (offset.double() if bias else 0)
        assert_close(cpu.linear(x, packed), exact, absolute=slack(in_features))


def test_many_rows_and_long_sums(dtype):
    weight, offset = layer(200, 3000, dtype, bias=True)
    x = torch.randn(600, 3000).to(dtype)
    exact = x.double() @ weight.double().T + offset.double()
    assert_close(cpu.linear(x, cpu.prepare_linear(weight, offset)), exact, absolute=slack(3000))


@pytest.mark.parametrize(("out_features", "in_features"), [(47, 65), (300, 1500)])
def test_a_row_has_the_same_bits_in_any_batch(dtype, out_features, in_features):
    packed = cpu.prepare_linear(*layer(out_features, in_features, dtype, bias=True))
    x = torch.randn(600, in_features).to(dtype)
    whole = cpu.linear(x, packed)
    for rows in (*ROWS, 255, 256, 257, 300):
        for first in (0, 1, 600 - rows):
            part = cpu.linear(x[first : first + rows], packed)
            assert torch.equal(part, whole[first : first + rows]), (first, rows)


def test_threads_do_not_change_bits(dtype):
    packed = cpu.prepare_linear(*layer(1024, 768, dtype))
    for rows in (1, 8, 40, 300):
        x = torch.randn(rows, 768).to(dtype)
        results = []
        for threads in (1, 2, 5):
            cpu.set_num_threads(threads)
            results.append(cpu.linear(x, packed))
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


def test_rows_are_read_within_their_bounds(dtype):
    """With odd in_features, the last pair of a row must not read the first value of the next row."""
    packed = cpu.prepare_linear(*layer(33, 31, dtype))
    x = torch.full((9, 31), float("nan")).to(dtype)
    x[3] = 1
    got = cpu.linear(x, packed)
    assert got[3].isfinite().all()
    assert got[[0, 1, 2, 4, 5, 6, 7, 8]].isnan().all()


def test_a_weight_that_is_not_dense_is_packed_as_it_reads(dtype):
    weight = torch.randn(64, 48).to(dtype)
    x = torch.randn(3, 64).to(dtype)
    got = cpu.linear(x, cpu.prepare_linear(weight.T, None))
    assert torch.equal(got, cpu.linear(x, cpu.prepare_linear(weight.T.contiguous(), None)))


def test_float16_goes_to_the_reference():
    weight = torch.randn(8, 6, dtype=torch.float16)
    x = torch.randn(2, 6, dtype=torch.float16)
    got = cpu.linear(x, cpu.prepare_linear(weight, None))
    assert torch.equal(got, reference.linear(x, reference.prepare_linear(weight, None)))


def test_no_rows(dtype):
    packed = cpu.prepare_linear(*layer(16, 8, dtype))
    assert cpu.linear(torch.empty(0, 8).to(dtype), packed).shape == (0, 16)
