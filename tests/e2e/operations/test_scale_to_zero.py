"""No worker, then one, then none, then one: requests sent meanwhile are answered later."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from quire import SamplingParams
from quire.client import Client
from quire.cluster import Cluster
from tests.e2e.conftest import running_cluster
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

QUESTION, ANSWER = "What is 23 + 45?", "68"
GREEDY = SamplingParams(temperature=0, max_tokens=40)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
NUM_ASKED = 8  # over each edge
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Cluster without workers; requests wait only for the first worker."""
    frontend = {"unavailable_after_s": 0, "worker_start_s": 120}
    with running_cluster(workers=0, frontend=frontend, worker={"num_blocks": 2000}) as running:
        until(lambda: samples(running, "quire_frontend_sessions_open") == 1)
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * NUM_ASKED + 1) as threads:
        yield threads


def samples(cluster: Cluster, name: str) -> float:
    page = httpx.get(f"http://{cluster.http_address}/metrics").text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name)


def over_grpc(cluster: Cluster) -> str:
    with Client(cluster.grpc_address) as client:
        (answer,) = client.chat([{"role": "user", "content": QUESTION}], GREEDY)
        return answer.text


def over_http(cluster: Cluster) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 40}
    reply = httpx.post(f"http://{cluster.http_address}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    reply.raise_for_status()
    return str(reply.json()["choices"][0]["message"]["content"])


def until_nobody_is_left(cluster: Cluster) -> None:
    """Waits until no worker is left and the frontend knows, so that it holds later requests."""
    cluster.scale_workers(0)
    with Client(cluster.grpc_address) as client:
        until(lambda: not any(model.ready for model in client.models()))


def test_requests_without_a_worker_are_answered_by_the_first_one(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    for _ in range(2):
        num_held = samples(cluster, "quire_frontend_held_seconds_count")
        asked = [pool.submit(ask, cluster) for ask in (over_grpc, over_http) for _ in range(NUM_ASKED)]
        until(lambda: samples(cluster, "quire_frontend_held_requests") == 2 * NUM_ASKED)
        began_s = time.monotonic()
        cluster.scale_workers(1)
        ready_s = time.monotonic()
        assert [answer.result(PATIENCE_S) for answer in asked] == [ANSWER] * 2 * NUM_ASKED
        print(f"a worker after {ready_s - began_s:.2f} s, all answers {time.monotonic() - ready_s:.2f} s later")
        assert samples(cluster, "quire_frontend_held_requests") == 0
        assert samples(cluster, "quire_frontend_held_seconds_count") - num_held == 2 * NUM_ASKED
        until_nobody_is_left(cluster)


def drained(cluster: Cluster) -> None:
    """Ends a worker by a drain."""
    cluster.scale_workers(0)


def killed(cluster: Cluster) -> None:
    """Kills a worker as if its node was removed: it is not restarted."""
    process = cluster.process("worker-0")
    cluster.processes.remove(process)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.close()


@pytest.mark.parametrize("leaves", [drained, killed])
def test_stream_continues_when_the_last_worker_is_replaced(cluster: Cluster, leaves: Callable[[Cluster], None]) -> None:
    cluster.scale_workers(1)
    with Client(cluster.grpc_address) as client:
        (expected,) = client.generate("Count", LONG)
        said: list[str] = []
        begun = threading.Event()

        def listen() -> None:
            for delta in client.stream("Count", LONG):
                said.append(delta.text)
                begun.set()

        listener = threading.Thread(target=listen)
        listener.start()
        assert begun.wait(PATIENCE_S)
        leaves(cluster)
        cluster.scale_workers(1)
        listener.join(PATIENCE_S)
    assert "".join(said) == expected.text
