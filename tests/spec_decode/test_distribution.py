"""Tokens after drafts follow the model's distribution exactly with both rules, whatever the drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire import kernels
from quire.kernels import reference
from quire.services.worker.sampling.rejection import accept_or_resample, uniform
from quire.services.worker.sampling.vocabulary.whole_vocabulary import WholeVocabulary

VOCAB = 10
DRAWS = 200_000


ALL_TOKENS = WholeVocabulary(VOCAB, kernels.load("cpu"))


def logits_of(seed: int, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def shares(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=VOCAB) / len(tokens)


def rows(values: torch.Tensor, count: int) -> torch.Tensor:
    return values.expand(count, VOCAB).contiguous()


def draw(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    hot = torch.ones(len(seeds))
    return reference.sample(rows(logits, len(seeds)), hot, None, None, None, seeds, positions).long()


def ruled(
    target: torch.Tensor,
    proposed: torch.Tensor | None,
    drafts: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    return accept_or_resample(target, proposed, drafts, seeds=seeds, positions=positions, vocabulary=ALL_TOKENS)


def first_tokens(target: torch.Tensor, proposed: torch.Tensor | None, count: int, seed: int) -> torch.Tensor:
    """Samples the token at a position with a draft; without `proposed` the draft is always token 3."""
    seeds = torch.arange(count) * 7919 + seed
    positions = torch.full((count,), 5, dtype=torch.int32)
    if proposed is None:
        drafts = torch.full((count,), 3)
        return ruled(rows(target, count), None, drafts, seeds, positions)
    drafts = draw(proposed, seeds + 1_000_003, positions)
    return ruled(rows(target, count), rows(proposed, count), drafts, seeds, positions)


@pytest.mark.parametrize("proposed", [None, logits_of(2), logits_of(1)], ids=["certain", "another model", "the same"])
def test_the_rejection_rule_preserves_the_target_distribution(proposed: torch.Tensor | None) -> None:
    target = logits_of(1)
    distances = []
    for count in (100, 2_000, DRAWS):
        found = shares(first_tokens(target, proposed, count, seed=count))
        distances.append(float((found - target.softmax(0)).abs().sum()))
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 4 * (VOCAB / DRAWS) ** 0.5


def test_tokens_after_an_accepted_draft_are_independent_of_it() -> None:
    """Pairs of tokens at two positions follow the product of both distributions."""
    first, second, proposed = logits_of(1), logits_of(3), logits_of(2)
    seeds = torch.arange(DRAWS) * 31 + 5
    at = [torch.full((DRAWS,), position, dtype=torch.int32) for position in (5, 6)]
    drafts = draw(proposed, seeds + 77, at[0])
    one = ruled(rows(first, DRAWS), rows(proposed, DRAWS), drafts, seeds, at[0])
    kept = one == drafts
    two = draw(second, seeds, at[1])
    pairs = torch.zeros(VOCAB, VOCAB).index_put_((one[kept], two[kept]), torch.ones(int(kept.sum())), accumulate=True)
    expected = pairs.sum(1, keepdim=True) * second.softmax(0)
    chi_square = float(((pairs - expected).square() / expected.clamp(min=1)).sum())
    assert chi_square < 99 + 6 * (2 * 99) ** 0.5


def test_the_acceptance_rate_equals_the_overlap_of_both_distributions() -> None:
    target, proposed = logits_of(1), logits_of(2)
    seeds = torch.arange(DRAWS)
    positions = torch.zeros(DRAWS, dtype=torch.int32)
    drafts = draw(proposed, seeds + 9_999_991, positions)
    kept = ruled(rows(target, DRAWS), rows(proposed, DRAWS), drafts, seeds, positions) == drafts
    overlap = float(torch.minimum(target.softmax(0), proposed.softmax(0)).sum())
    assert float(kept.float().mean()) == pytest.approx(overlap, abs=0.005)


def test_coupled_drafts_agree_nearly_as_often() -> None:
    """With shared noise the agreement is at least (1 - d) / (1 + d), d being the distance of the distributions."""
    target, proposed = logits_of(1), logits_of(2)
    seeds = torch.arange(DRAWS)
    positions = torch.zeros(DRAWS, dtype=torch.int32)
    agreed = float((draw(target, seeds, positions) == draw(proposed, seeds, positions)).float().mean())
    distance = float((target.softmax(0) - proposed.softmax(0)).abs().sum()) / 2
    assert agreed >= (1 - distance) / (1 + distance) - 0.005
    assert agreed <= 1 - distance + 0.005


def test_draws_are_uniform_and_depend_on_seed_and_position() -> None:
    seeds, positions = torch.arange(DRAWS), torch.arange(DRAWS, dtype=torch.int32) % 100
    values = uniform(seeds, positions)
    counts = np.histogram(values.numpy(), bins=20, range=(0, 1))[0]
    assert abs(counts / DRAWS - 0.05).max() < 0.003
    assert torch.equal(values, uniform(seeds, positions))
    assert (values != uniform(seeds + 1, positions)).all()
