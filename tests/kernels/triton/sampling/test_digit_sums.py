from __future__ import annotations

import pytest
import torch

from quire.kernels import reference
from quire.kernels.reference.sampling.digit_sums import UNIT, ordered_bits, value_of, weights_of
from quire.kernels.triton.sampling.digit_sums import digit_sums

INF = float("inf")


def spread(device, num_rows, size):
    values = 3 * torch.randn(num_rows, size)
    values[::3] = values[::3].round()  # many equal values, and both zeros
    values[1, : size // 2] = -INF
    return values.to(device)


@pytest.mark.parametrize("size", [1, 700, 4096, 9000])
def test_counts_and_weights_are_the_reference(device, size):
    values = spread(device, 5, size)
    tops = values.amax(dim=1, keepdim=True)
    known = torch.zeros((5, 1), dtype=torch.int64, device=device)
    for shift in (24, 16, 8, 0):
        counts = digit_sums(values, None, known, shift)
        assert torch.equal(counts, reference.digit_sums(values, None, known, shift))
        assert counts.dtype is torch.int32
        weights, want = (sums(values, tops, known, shift) for sums in (digit_sums, reference.digit_sums))
        assert weights.dtype is torch.int64
        torch.testing.assert_close(weights.double(), want.double(), rtol=1e-6, atol=2.0)
        assert torch.equal(weights > 0, want > 0)
        known = (known << 8) | counts.argmax(dim=1, keepdim=True)  # the most frequent digit
    assert (counts > 0).any()


def test_known_digits_exclude_other_values(device):
    """Once all digits are known, only values equal to them are counted."""
    values = torch.tensor([[1.5, -2.0, 1.5, 0.25, 7.0]] * 2, device=device)
    for value, count in ((1.5, 2), (-2.0, 1), (3.0, 0)):
        bits = ordered_bits(torch.full((2, 1), value, device=device))
        found = digit_sums(values, None, bits >> 8, 0)
        assert found.sum(dim=1).tolist() == [count] * 2
        assert found.gather(1, bits & 255).flatten().tolist() == [count] * 2


def test_rows_of_a_wider_tensor_and_none(device):
    wide = spread(device, 4, 1000)
    known = torch.zeros((4, 1), dtype=torch.int64, device=device)
    found = digit_sums(wide[:, 100:400], None, known, 24)
    assert torch.equal(found, reference.digit_sums(wide[:, 100:400].contiguous(), None, known, 24))
    assert digit_sums(wide[:0], None, known[:0], 24).shape == (0, 256)


def test_digits_are_in_range_for_any_row(device):
    values = torch.tensor([[float("nan"), INF, -INF, 0.0, -0.0]], device=device)
    known = torch.zeros((1, 1), dtype=torch.int64, device=device)
    assert int(digit_sums(values, None, known, 24).sum()) == 5
    assert int(digit_sums(values, torch.tensor([[0.0]], device=device), known, 24).sum()) >= 2 * UNIT


def test_bits_are_in_the_order_of_the_values():
    values = torch.cat((torch.randn(1000), torch.tensor([-INF, INF, 0.0, -0.0, 1e-45, -1e-45])))
    order = ordered_bits(values).argsort(stable=True)
    assert torch.equal(values[order], values.sort().values)
    assert torch.equal(value_of(ordered_bits(values)), values)
    assert weights_of(torch.tensor([[1.0, float("nan"), -INF]]), torch.tensor([[1.0]])).tolist() == [[int(UNIT), 0, 0]]
