"""KV transfer between workers, through real processes: one worker uses what another has computed, and outputs do not
change."""

from __future__ import annotations

import httpx
import pytest

from quire import SamplingParams, StructuredOutput
from quire.client import Client
from quire.cluster import Cluster
from tests.e2e.conftest import running_cluster
from tools.evals import held_back_items

GREEDY = SamplingParams(temperature=0, max_tokens=16)
WORKER = {"num_blocks": 2000, "threads": 1}
ALWAYS = {"kv_handover": "always"}  # which of the two is faster here depends on what else runs
LONG = 1200  # characters


def questions(count: int = 7) -> list[list[dict[str, str]]]:
    """An odd number of prompts, so that two alternating workers swap them from one round to the next."""
    items = held_back_items(60, names=("recall", "lists"))
    return [item.messages for item in items if len(item.messages[0]["content"]) > LONG][:count]


def metric_total(cluster: Cluster, name: str) -> float:
    """Value of a scheduler metric, summed over labels."""
    scheduler = next(process for process in cluster.processes if process.spec.role == "scheduler")
    page = httpx.get(f"http://{scheduler.addresses['metrics']}/metrics").text
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))
    )


@pytest.mark.slow
def test_prompts_are_fetched_from_the_worker_that_has_them(client: Client) -> None:
    asked = questions()
    expected = [client.chat(messages, GREEDY)[0].text for messages in asked]
    with (
        running_cluster(workers=2, worker=WORKER, scheduler={"placement": "round_robin", **ALWAYS}) as cluster,
        Client(cluster.grpc_address) as two,
    ):
        rounds = [[two.chat(messages, GREEDY)[0] for messages in asked] for _ in range(3)]
        assert [[answer.text for answer in answers] for answers in rounds] == [expected] * 3
        assert metric_total(cluster, "quire_scheduler_fetches_total") > 0
        assert metric_total(cluster, "quire_scheduler_fetched_tokens_total") >= 2 * 16
        assert metric_total(cluster, "quire_scheduler_blocks_unowned") == 0


APART = {"prefill_threshold": 16}
FORM = StructuredOutput(regex="[a-z]{3} [a-z]{3}")
ASKED = {
    "greedy": SamplingParams(temperature=0, max_tokens=300, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, seed=5, max_tokens=100, ignore_eos=True, logprobs=2),
    "several": SamplingParams(temperature=0.9, seed=6, n=3, max_tokens=16),
    "in a form": SamplingParams(temperature=0.9, seed=7, max_tokens=16, structured_output=FORM),
    "prompt log-probabilities": SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1),
}


def answers(client: Client, asked: list[list[dict[str, str]]]) -> dict[str, list[tuple[list[int], int]]]:
    """Tokens and number of log-probabilities of every sample."""
    found = {}
    for kind, params in ASKED.items():
        results = [sample for messages in asked for sample in client.chat(messages, params)[0].outputs]
        found[kind] = [(list(result.token_ids), len(result.logprobs or ())) for result in results]
    return found


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_prompts_are_computed_by_one_worker_and_decoded_by_another(client: Client, count: int) -> None:
    asked = questions(count)
    expected = answers(client, asked)
    with (
        running_cluster(apart=(1, 1), worker=WORKER, scheduler=APART) as cluster,
        Client(cluster.grpc_address) as two,
    ):
        assert answers(two, asked) == expected
        assert metric_total(cluster, "quire_scheduler_handovers_total") >= 1
        assert metric_total(cluster, "quire_scheduler_blocks_unowned") == 0
        assert metric_total(cluster, "quire_scheduler_role_missing") == 0
