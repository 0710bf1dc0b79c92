from __future__ import annotations

import pytest
import torch

from quire.kernels import reference
from quire.kernels.triton.sampling.part_sampling import best_of_part, best_of_parts
from tests.kernels.triton.sampling.test_sampling import INF, assert_same_choice, column, rows_of


def chosen(logits, temperature, seeds, positions, size):
    """Samples by parts of `size` tokens."""
    starts = range(0, logits.size(1), size)
    parts = [logits[:, start : start + size] for start in starts]
    found = [
        best_of_part(part, temperature, seeds, positions, start) for part, start in zip(parts, starts, strict=True)
    ]
    return best_of_parts(torch.stack(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "size"), [(9000, 4500), (9000, 9000), (1000, 333), (5, 2), (16_400, 8_200)])
def test_parts_choose_as_the_whole_vocabulary(device, vocab_size, size, dtype):
    logits, seeds, positions = rows_of(device, 9, vocab_size)
    logits = logits.to(dtype)
    logits[4, : vocab_size // 2] = -INF
    temperature = (0.1 + 2 * torch.rand(9)).to(device)
    got = chosen(logits, temperature, seeds, positions, size)
    want = reference.sample(logits.float(), temperature, None, None, None, seeds, positions)
    assert_same_choice(got, want, logits, temperature, seeds, positions)


@pytest.mark.parametrize("size", [700, 4096, 9000])
def test_greedy_takes_the_lowest_of_the_most_likely_of_all_parts(device, size):
    logits, seeds, positions = rows_of(device, 8, 9000)
    logits = logits.round()  # many equal values
    first = (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1).int()
    for temperature in (None, column(device, 0.0, 8)):
        assert torch.equal(chosen(logits, temperature, seeds, positions, size), first)


def test_candidates_of_a_part_equal_the_reference(device):
    logits, seeds, positions = rows_of(device, 7, 5000)
    logits[1, 40], logits[2, 4999], logits[3] = float("nan"), INF, -INF
    temperature = column(device, 0.7, 7)
    temperature[::2] = 0.0
    got = best_of_part(logits, temperature, seeds, positions, 128_000)
    want = reference.best_of_part(logits, temperature, seeds, positions, 128_000)
    kept = [0, 4, 5, 6]
    assert torch.equal(got[kept, 1:], want[kept, 1:])
    scores = [each[kept, 0].contiguous().view(torch.float32) for each in (got, want)]
    torch.testing.assert_close(*scores, rtol=2e-6, atol=2e-6)
    tops = got[1:4, 2].contiguous().view(torch.float32).tolist()
    assert tops == [INF, INF, -INF]
    assert best_of_parts(got.unsqueeze(0))[1:4].tolist() == [-1, -1, -1]


def test_rows_of_a_wider_tensor_and_no_rows(device):
    wide, seeds, positions = rows_of(device, 3, 1000)
    got = best_of_part(wide[:, 100:400], None, seeds, positions, 100)
    assert torch.equal(got[:, 1], (100 + wide[:, 100:400].argmax(dim=1)).int())
    assert best_of_part(wide[:0], None, seeds[:0], positions[:0], 0).shape == (0, 3)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_the_best_of_parts_is_the_reference(device, num_parts):
    """Covers equal scores, rows without a candidate in one part or in all, and ids of any size."""
    scores = torch.randn(num_parts, 40).round()
    tops = torch.randn(num_parts, 40)
    scores[:, 3], tops[:, 3] = -INF, -INF
    tops[-1, 5], scores[0, 7], tops[0, 7] = INF, float("nan"), INF
    ids = torch.randint(0, 200_000, (num_parts, 40), dtype=torch.int32)
    found = torch.stack((scores.view(torch.int32), ids, tops.view(torch.int32)), dim=2).to(device)
    got = best_of_parts(found)
    assert torch.equal(got, reference.best_of_parts(found))
    assert got[[3, 5, 7]].tolist() == [-1, -1, -1]
    assert (got >= 0).sum() == 37
    assert best_of_parts(found[:, :0].contiguous()).shape == (0,)
