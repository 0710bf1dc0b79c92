"""sample() draws from exactly the distribution that its parameters describe."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.reference import sample

DRAWS = 40_000
# Chi-square beyond these has a probability under 1e-5 (by degrees of freedom); seeds are fixed.
CRITICAL = {1: 19.5, 2: 23.0, 3: 25.9, 4: 28.5, 5: 30.9, 6: 33.1, 7: 35.3, 8: 37.3, 9: 39.3}

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.5, 0.0, -1.0, -2.0, 1.5])


def column(value: float | None, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    return None if value is None else torch.full((rows,), value, dtype=dtype)


def draw(
    logits: torch.Tensor,
    temperature: float | None = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    rows: int = DRAWS,
) -> torch.Tensor:
    """Samples one token for each of `rows` positions of one seed."""
    return sample(
        logits.expand(rows, -1).clone(),
        column(temperature, rows),
        column(top_k, rows, torch.int32),
        column(top_p, rows),
        column(min_p, rows),
        torch.full((rows,), 42),
        torch.arange(rows, dtype=torch.int32),
    )


def assert_distributed(found: torch.Tensor, probabilities: torch.Tensor) -> None:
    counts = torch.bincount(found, minlength=len(probabilities)).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0, "a dropped token was sampled"
    expected = probabilities[possible].double() * len(found)
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum().item()
    assert chi_square < CRITICAL[int(possible.sum()) - 1]


def softmax_of(kept: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Returns probabilities if only `kept` ids may be sampled."""
    logits = torch.full_like(LOGITS, float("-inf"))
    logits[kept] = LOGITS[kept] / temperature
    return logits.softmax(0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    assert_distributed(draw(LOGITS, temperature), (LOGITS / temperature).softmax(0))


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({"top_k": 2}, [0, 7]),
        ({"top_k": 4}, [0, 7, 1, 2, 3]),  # 2 and 3 have equal logits
        ({"top_k": 100}, list(range(8))),
        ({"top_k": 0}, list(range(8))),
        ({"top_k": -1}, list(range(8))),
        ({"top_p": 0.4}, [0, 7]),  # probabilities 0.37, 0.23, 0.14, ...: the second passes 0.4
        ({"top_p": 0.3}, [0]),
        ({"top_p": 1e-6}, [0]),
        ({"top_p": 1.0}, list(range(8))),
        ({"top_p": 0.8}, [0, 7, 1, 2, 3]),
        ({"min_p": 0.3}, [0, 7, 1]),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.0}, list(range(8))),
        ({"min_p": 0.3, "top_k": 2}, [0, 7]),
        ({"top_k": 3, "top_p": 0.6}, [0, 7]),  # after top-k, 0.51 and 0.31 reach 0.6
        ({"min_p": 0.05, "top_k": 6, "top_p": 0.99}, [0, 7, 1, 2, 3, 4]),
    ],
)
def test_filters_keep_exactly_these(parameters: dict[str, float], kept: list[int]) -> None:
    found = draw(LOGITS, **parameters)  # type: ignore[arg-type]
    if len(kept) == 1:
        assert (found == kept[0]).all()
    else:
        assert_distributed(found, softmax_of(kept))


def test_filters_look_at_probabilities_after_temperature() -> None:
    kept = [0, 7, 1, 2, 3]
    assert_distributed(draw(LOGITS, 2.0, min_p=0.4), softmax_of(kept, 2.0))


def test_a_banned_token_is_never_sampled() -> None:
    logits = LOGITS.clone()
    logits[[0, 3]] = float("-inf")
    assert_distributed(draw(logits, top_p=0.999), softmax_of([1, 2, 4, 5, 6, 7]))


def test_unlikely_tokens_keep_their_share() -> None:
    """A token of probability 1 / 20,000 is expected 20 times in 400,000 draws; 3 to 45 times are accepted."""
    logits = torch.tensor([0.0, -9.9035])
    count = int((draw(logits, rows=400_000) == 1).sum())
    assert 3 <= count <= 45


def test_a_token_is_a_function_of_seed_and_position_and_of_nothing_else() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, 101, generator=generator)
    seeds, positions = torch.arange(64) * 977, torch.arange(64, dtype=torch.int32) * 3
    temperature = torch.rand(64, generator=generator).add(0.5)
    temperature[::7] = 0
    top_k = torch.randint(0, 50, (64,), generator=generator, dtype=torch.int32)
    top_p = torch.rand(64, generator=generator).clamp(0.1, 1)
    min_p = torch.rand(64, generator=generator) * 0.1
    parts = (temperature, top_k, top_p, min_p, seeds, positions)
    together = sample(logits.clone(), *parts)
    order = torch.randperm(64, generator=generator)
    shuffled = sample(logits[order].clone(), *(part[order] for part in parts))
    assert torch.equal(shuffled, together[order])
    for row in range(0, 64, 5):
        alone = sample(logits[row : row + 1].clone(), *(part[row : row + 1] for part in parts))
        assert alone[0] == together[row]


def test_other_seeds_and_other_positions_sample_otherwise() -> None:
    logits, rows = torch.zeros(200, 50), torch.arange(200)
    ones = torch.ones(200)
    fixed_seed = sample(logits.clone(), ones, None, None, None, rows * 0, rows.int())
    fixed_position = sample(logits.clone(), ones, None, None, None, rows, rows.int() * 0)
    assert len(fixed_seed.unique()) > 40
    assert len(fixed_position.unique()) > 40


def test_greedy_takes_the_first_of_equals_whatever_its_neighbours_do() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [9.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    seeds, positions = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    assert sample(logits.clone(), None, None, None, None, seeds, positions).tolist() == [1, 0, 2]
    temperature = torch.tensor([0.0, 1.0, 0.0])
    top_k = torch.tensor([0, 1, 0], dtype=torch.int32)
    assert sample(logits.clone(), temperature, top_k, None, None, seeds, positions).tolist() == [1, 0, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_candidates_do_not_affect_others(temperature: float) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, nan, 1.0], [-inf, -inf, 0.0], [-inf, -inf, -inf], [0.0, inf, 0.0], [nan, nan, nan]])
    rows = len(logits)
    columns = (column(temperature, rows), column(2, rows, torch.int32), column(0.9, rows), column(0.1, rows))
    found = sample(logits, *columns, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32))
    assert found.tolist() == [-1, 2, -1, -1, -1]
    assert found.dtype == torch.int32
