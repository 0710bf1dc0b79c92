"""The noise agrees with the definition in noise.py and has the right distribution."""

from __future__ import annotations

import math

import pytest
import torch

from quire.kernels.reference import gumbel_noise

WORD = 0xFFFFFFFF


def mix(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & WORD
    return h ^ (h >> 16)


def noise(seed: int, position: int, token: int) -> float:
    """Computes the noise from its definition with Python's integers and doubles."""
    low, high = seed & WORD, (seed >> 32) & WORD
    key0 = mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ position)
    key1 = mix(mix(mix(high ^ 0x7F4A7C15) ^ low) ^ position)
    word = mix(mix((token * 0x9E3779B1 + key0) & WORD) ^ key1)
    v = min(word * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    return -math.log(-math.log1p(-v))


def draw(seeds: list[int], positions: list[int], vocab_size: int) -> torch.Tensor:
    return gumbel_noise(torch.tensor(seeds), torch.tensor(positions, dtype=torch.int32), vocab_size)


@pytest.mark.parametrize("seed", [0, 1, -1, 12345678901234567, -(2**63), 2**63 - 1])
def test_noise_is_as_defined(seed: int) -> None:
    positions = [0, 1, 2**31 - 1]
    found = draw([seed] * 3, positions, 300)
    expected = [[noise(seed, position, token) for token in range(300)] for position in positions]
    torch.testing.assert_close(found, torch.tensor(expected), atol=2e-5, rtol=1e-5)


def test_noise_depends_on_seed_position_and_token_only() -> None:
    alone = draw([5], [9], 50)
    among = draw([4, 5, 6], [9, 9, 9], 200)
    assert torch.equal(alone[0], among[1, :50])


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    """The mean is 0.57722 and the variance pi squared / 6, measured on 4 million draws."""
    found = draw(list(range(40)), list(range(40)), 100_000).double()
    assert found.mean().item() == pytest.approx(0.57722, abs=0.003)
    assert found.var().item() == pytest.approx(math.pi**2 / 6, abs=0.006)


def test_neighbouring_seeds_positions_and_tokens_are_not_correlated() -> None:
    """The correlation of n independent pairs is within 5 / sqrt(n)."""
    rows = draw([7, 8, 7, 7 + 2**32], [3, 3, 4, 3], 200_000)
    correlation = torch.corrcoef(rows)
    shifted = torch.corrcoef(torch.stack((rows[0, 1:], rows[0, :-1])))
    assert (correlation - torch.eye(4)).abs().max() < 5 / 200_000**0.5
    assert shifted[0, 1].abs() < 5 / 200_000**0.5
