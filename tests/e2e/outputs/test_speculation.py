"""Speculation through real processes: the text is unchanged, and metrics count accepted drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import SamplingParams, bundled
from quire.client import Client
from quire.cluster import Cluster
from tests.e2e.conftest import running_cluster
from tests.e2e.observability.test_metrics import page
from tests.waiting import worker_of

DRAFTERS = Path(bundled.FOLDER).parent / "drafters"
PROMPTS = ["Count from 1 to 30: 1, 2, 3", "Once upon a time", "12 + 34 = "]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60),
    SamplingParams(temperature=0.8, seed=5, n=3, max_tokens=40, logprobs=2),
    SamplingParams(temperature=0.7, seed=1, max_tokens=40, stop=[" and"], presence_penalty=0.4),
]


@pytest.fixture(scope="module")
def drafting() -> Iterator[Cluster]:
    config = {"method": "eagle", "model": str(DRAFTERS / "eagle"), "num_speculative_tokens": 3}
    worker = {"num_blocks": 2000, "speculative_config": json.dumps(config)}
    with running_cluster(worker=worker) as running:
        yield running


@pytest.mark.parametrize("number", range(len(PARAMS)))
def test_clients_see_no_difference(client: Client, drafting: Cluster, number: int) -> None:
    expected = client.generate(PROMPTS, PARAMS[number])
    with Client(drafting.grpc_address) as other:
        found = other.generate(PROMPTS, PARAMS[number])
    for ours, theirs in zip(found, expected, strict=True):
        for output, wanted in zip(ours.outputs, theirs.outputs, strict=True):
            assert (output.text, output.token_ids, output.finish_reason) == (
                wanted.text,
                wanted.token_ids,
                wanted.finish_reason,
            )


def test_metrics_count_drafts(drafting: Cluster) -> None:
    with Client(drafting.grpc_address) as client:
        client.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=60))
        client.pause_generation()  # a last step may still have been under way
        worker = worker_of(client)
        scheduler = page(next(p for p in drafting.processes if p.spec.role == "scheduler").addresses["metrics"])
        client.resume_generation()
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    drafts, tokens, accepted, by_position = (scheduler[f"vllm:spec_decode_{name}_total"] for name in names)
    assert 3 * drafts >= tokens >= accepted == by_position > 0
    assert worker.drafts.num_accepted_tokens == accepted
    assert 0 <= scheduler["quire_scheduler_draft_length"] <= 3
