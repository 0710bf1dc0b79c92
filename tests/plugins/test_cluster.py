"""A cluster with the example package installed uses its scheduling policy and its logits processor."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import SamplingParams
from quire.client import Client
from quire.cluster import Cluster
from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2
from tests.e2e.conftest import running_cluster
from tests.waiting import until

ASKED = {"multiples": {"of": 7}}
UNKNOWN = "logits_processors: 'nobodys' does not exist; available: multiples."


@pytest.fixture(scope="module")
def cluster(installed: Path) -> Iterator[Cluster]:
    """Starts a cluster that runs one sequence at a time, with the worker's processor and the scheduler's policy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]))
        scheduler = {"scheduling_policy": "shortest_first", "max_num_seqs": 1}
        with running_cluster(scheduler=scheduler, worker={"num_blocks": 400}) as running:
            yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.grpc_address) as connected:
        yield connected


def post(cluster: Cluster, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://{cluster.http_address}/v1/{path}", json=body, timeout=60)


def test_a_request_names_a_logits_processor(cluster: Cluster, client: Client) -> None:
    """Checks every edge, concurrently with requests that name no processor."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True, logits_processors=ASKED)
    ids = client.generate("Once upon a time", params)[0].outputs[0].token_ids
    body = {"max_tokens": 20, "temperature": 0.8, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    completion = post(cluster, "completions", {**body, "prompt": "Once upon a time", "logits_processors": ASKED})
    messages = [{"role": "user", "content": "Hello"}]
    chat = post(cluster, "chat/completions", {**body, "messages": messages, "logits_processors": ASKED})
    plain = post(cluster, "completions", {**body, "prompt": "Once upon a time"})
    assert len(ids) == 20
    assert all(token % 7 == 0 for token in ids)
    assert completion.json()["choices"][0]["token_ids"] == ids
    assert all(token % 7 == 0 for token in chat.json()["choices"][0]["token_ids"])
    assert not all(token % 7 == 0 for token in plain.json()["choices"][0]["token_ids"])


def test_responses_name_it_too(cluster: Cluster) -> None:
    body = {"input": "Hello", "temperature": 0, "max_output_tokens": 12, "ignore_eos": True}
    plain, asked = (post(cluster, "responses", body | more) for more in ({}, {"logits_processors": ASKED}))
    assert asked.status_code == 200
    assert asked.json()["output"] != plain.json()["output"]


def test_an_unknown_logits_processor_is_refused_by_name(cluster: Cluster, client: Client) -> None:
    with pytest.raises(InvalidArgument) as refused:
        client.generate("x", SamplingParams(logits_processors={"nobodys": {}}))
    assert refused.value.message == UNKNOWN
    reply = post(cluster, "completions", {"prompt": "x", "logits_processors": {"nobodys": None}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logits_processors")
    assert reply.json()["error"]["message"] == UNKNOWN


def test_unsupported_arguments_are_reported(cluster: Cluster) -> None:
    reply = post(cluster, "completions", {"prompt": "x", "logits_processors": {"multiples": {"off": 7}}})
    assert reply.status_code == 400
    assert "logits_processors: multiples: ValueError: takes one argument, of, " in reply.json()["error"]["message"]


def test_the_scheduling_policy_orders_waiting_requests(client: Client) -> None:
    """Sends the long prompt first and expects it last: its prefix, which is the short prompt, is cached by then."""

    def num_waiting() -> int:
        return next(s.waiting for s in client.status() if s.role == admin_pb2.ROLE_SCHEDULER)

    cached = {}

    def ask(length: int) -> None:
        (answer,) = client.generate([40] * length, SamplingParams(max_tokens=2))
        cached[length] = answer.cached_tokens

    client.pause_generation()
    threads = []
    for number, length in enumerate((300, 40), start=1):
        threads.append(threading.Thread(target=ask, args=(length,)))
        threads[-1].start()
        until(lambda number=number: num_waiting() == number)  # type: ignore[misc]
    client.resume_generation()
    for thread in threads:
        thread.join()
    assert cached[40] == 0
    assert cached[300] >= 32
