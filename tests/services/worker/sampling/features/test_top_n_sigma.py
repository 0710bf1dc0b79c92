"""Compares top_n_sigma with plain numpy, also after features that ban tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.services.worker.sampling.sampler import Sampler
from tests.services.worker.sampling.test_sampler import LOGITS, NEG_INF, Bench


def expected(logits: list[float], sigma: float) -> list[int]:
    left = np.array([logit for logit in logits if logit > NEG_INF], dtype=np.float64)
    least = left.max() - sigma * left.std()
    return [i for i, logit in enumerate(logits) if logit > NEG_INF and logit >= least]


def kept(logits: torch.Tensor) -> list[int]:
    return [i for i, logit in enumerate(logits.tolist()) if logit > NEG_INF]


@pytest.mark.parametrize("sigma", [0.25, 0.5, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_tokens_far_below_the_largest_are_dropped(sigma: float, temperature: float) -> None:
    bench = Bench()
    bench.admit(0, temperature=temperature)
    bench.admit(2, temperature=temperature, top_n_sigma=sigma)
    rows = bench.logits()
    assert rows[0].tolist() == LOGITS.tolist()
    assert kept(rows[1]) == expected(LOGITS.tolist(), sigma)


def test_banned_tokens_do_not_widen_the_deviation() -> None:
    bench = Bench()
    bench.admit(0, temperature=1.0, top_n_sigma=1.0, allowed_token_ids=[3, 5, 9, 6])
    allowed = [logit if i in {3, 5, 9, 6} else NEG_INF for i, logit in enumerate(LOGITS.tolist())]
    assert kept(bench.logits()[0]) == expected(allowed, 1.0) == [3, 5, 9]


def test_a_single_allowed_token_is_kept() -> None:
    bench = Bench()
    bench.admit(0, temperature=1.0, top_n_sigma=0.01, allowed_token_ids=[6])
    assert bench.tokens() == [6]


def test_greedy_sampling_is_unchanged() -> None:
    bench = Bench()
    bench.admit(0, top_n_sigma=0.5)
    assert bench.tokens() == [1]


def test_a_released_slot_is_not_filtered() -> None:
    bench = Bench()
    bench.admit(0, temperature=1.0, top_n_sigma=0.1)
    bench.release(0)
    bench.admit(0, temperature=1.0)
    assert len(kept(bench.logits()[0])) == len(LOGITS)


def test_rows_without_the_filter_can_use_graphs() -> None:
    bench = Bench()
    bench.admit(0, temperature=1.0)
    bench.admit(1, temperature=1.0, top_n_sigma=1.0)
    sampler: Sampler = bench.sampler
    assert sampler.plain(np.array([0])) is not None
    assert sampler.plain(np.array([0, 1])) is None
