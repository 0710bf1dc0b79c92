"""Many concurrent streams with few blocks: every text equals that of a lone request."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quire import SamplingParams
from quire.client import Client
from quire.outputs import RequestOutput
from tests.e2e.conftest import running_cluster
from tests.waiting import until_idle, worker_of
from tools.evals import Item, held_back_items

STREAMS = 64


MAX_TOKENS = 250


def conversations() -> list[Item]:
    """Documents shared by several questions, long counts, and short questions of all kinds, in a mixed order."""
    recall = held_back_items(per_size=8, names=("recall",))[:24]
    counting = held_back_items(per_size=12, names=("counting",))
    counting = [item for item in counting if item.max_tokens > MAX_TOKENS][:24]
    short = held_back_items(per_size=1, names=("arithmetic", "lists", "json", "tools"))
    short = [item for item in short if not item.tools][:16]
    mixed = [*recall, *counting, *short]
    return [mixed[(i * 29) % len(mixed)] for i in range(len(mixed))]


def ask(client: Client, items: list[Item], at_a_time: int) -> list[RequestOutput]:
    """Returns each item's greedy answer, requested from `at_a_time` threads."""
    results: list[RequestOutput | None] = [None] * len(items)
    waiting = iter(range(len(items)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(waiting, None)
            if index is None:
                return
            params = SamplingParams(temperature=0, max_tokens=min(items[index].max_tokens, MAX_TOKENS))
            results[index] = client.chat(list(items[index].messages), params)[0]

    threads = [threading.Thread(target=work) for _ in range(at_a_time)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for result in results if result is not None]


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_preempted_streams_are_unchanged(caching: bool) -> None:
    settings: dict[str, dict[str, Any]] = {
        "worker": {"num_blocks": 300, "max_num_seqs": STREAMS},
        "scheduler": {"enable_prefix_caching": caching, "watermark": 0.0},
    }
    items = conversations()
    assert len(items) == STREAMS
    with running_cluster(**settings) as cluster, Client(cluster.grpc_address) as client:
        alone = ask(client, items, at_a_time=1)
        client.reset_prefix_cache()
        together = ask(client, items, at_a_time=STREAMS)
        until_idle(client)
        status = worker_of(client)
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]
    assert status.work.preemptions > 0, "299 blocks were meant to be too few"
    assert (status.work.cached_tokens > 0) is caching
