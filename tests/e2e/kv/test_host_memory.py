"""KV blocks in host memory, through real processes: prompts are read back, and outputs do not change."""

from __future__ import annotations

import functools
import os
import signal

from quire import SamplingParams
from quire.client import Client
from quire.cluster import Cluster
from quire.shared.pb.admin.v1 import admin_pb2
from tests.chaos.test_workers import pid
from tests.e2e.conftest import running_cluster
from tests.waiting import until_nothing_moves, worker_of
from tools.evals import held_back_items

GREEDY = SamplingParams(temperature=0, max_tokens=16)
FEW = {"num_blocks": 40, "block_size": 16, "kv_offloading_size": 0.02}
LONGEST = 3000  # characters


@functools.cache
def questions() -> list[list[dict[str, str]]]:
    """Prompts of more tokens than 39 blocks hold."""
    items = held_back_items(30, names=("recall", "lists"))
    return [item.messages for item in items if 200 < len(item.messages[0]["content"]) < LONGEST][:24]


def say(client: Client, asked: list[list[dict[str, str]]]) -> tuple[list[str], int, int]:
    """Returns the texts of sequential requests, and the numbers of all and of cached prompt tokens."""
    results = [client.chat(messages, GREEDY)[0] for messages in asked]
    prompts, cached = sum(r.prompt_tokens for r in results), sum(r.cached_tokens for r in results)
    return [result.text for result in results], prompts, cached


def host_memory(client: Client) -> admin_pb2.HostMemory:
    return worker_of(client).host_memory


def test_prompts_return_from_host_memory(client: Client) -> None:
    asked = questions()
    expected, num_prompt_tokens, _ = say(client, asked)
    with running_cluster(worker=FEW) as cluster, Client(cluster.grpc_address) as few:
        first, *_ = say(few, asked)
        held = until_nothing_moves(few).host_memory
        again, _, cached = say(few, asked)
        after = until_nothing_moves(few).host_memory
        assert [first, again] == [expected, expected]
        assert held.held > 60, "more than the device has"
        assert after.fetched > 40
        assert after.failed_transfers == 0
        assert cached > num_prompt_tokens / 2 > 39 * 16, "the device alone has the last few of them"
        _survives_a_scheduler(cluster, few, asked, expected)


def _survives_a_scheduler(
    cluster: Cluster, client: Client, asked: list[list[dict[str, str]]], expected: list[str]
) -> None:
    """A new scheduler learns the contents of host memory from the worker."""
    before = until_nothing_moves(client).host_memory.held
    os.kill(pid(cluster, "scheduler-0"), signal.SIGKILL)
    again, num_prompt_tokens, cached = say(client, asked)
    assert again == expected
    assert cached > num_prompt_tokens / 2
    after = until_nothing_moves(client).host_memory
    assert after.fetched > 40
    assert after.held >= before
