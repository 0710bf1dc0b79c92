"""A reinforcement learning loop around the engine."""

from __future__ import annotations

import pytest

from quire import Client, SamplingParams
from tests.e2e.conftest import running_cluster
from tools.training import grpo

pytestmark = pytest.mark.slow


def test_sums_in_words_that_were_never_trained_are_learned_from_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = grpo.train()
    assert before < 0.4
    assert after > 0.8
    assert f"step {grpo.NUM_STEPS}: " in capsys.readouterr().out


def test_a_cluster_samples_and_takes_the_weights_as_a_stream() -> None:
    with running_cluster(worker={"threads": 1, "num_blocks": 400, "dtype": "float32"}) as cluster:
        grpo.train(num_steps=2, address=cluster.grpc_address)
        with Client(cluster.grpc_address) as client:
            (output,) = client.generate("Count", SamplingParams(max_tokens=2))
    assert output.weight_version == "step-2"
