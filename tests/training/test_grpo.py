"""A loop of reinforcement learning around the engine."""

from __future__ import annotations

import pytest

from training import grpo

pytestmark = pytest.mark.slow


def test_sums_in_words_that_were_never_trained_are_learned_from_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = grpo.train()
    assert before < 0.4
    assert after > 0.8
    assert f"step {grpo.NUM_STEPS}: " in capsys.readouterr().out  # the engine's own count of weights
