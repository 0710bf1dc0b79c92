"""A sleeping cluster of real processes: memory is released, requests wait, and outputs do not change."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire import Client, SamplingParams
from quire.cli.main import main
from quire.cluster import Cluster, ClusterOptions
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.security import secret_file
from tests.waiting import until

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=2400, ignore_eos=True)  # seconds: it runs when sleep comes
PROMPT = "Once upon a time there was a boy who counted: " + ", ".join(map(str, range(400)))
KEY = "k" * 40
MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    key = tmp_path_factory.mktemp("sleep") / "key"
    secret_file.write(key, KEY)
    worker = {"threads": 1, "num_blocks": 2000, "dtype": "float32"}
    settings = {"worker": worker, "frontend": {"admin_key_file": str(key)}}
    with Cluster(ClusterOptions(http_port=0, grpc_port=0, settings=settings)) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.grpc_address) as connected:
        yield connected


def worker(client: Client) -> admin_pb2.ServiceStatus | None:
    return next((one for one in client.status() if one.role == admin_pb2.ROLE_WORKER), None)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("level", [1, 2])
def test_memory_goes_back_and_answers_are_the_same(client: Client, level: int) -> None:
    (before,) = client.generate(PROMPT, GREEDY)
    found = worker(client)
    assert found is not None
    used = resident_bytes(found.pid)
    assert client.sleep(level) == 0
    assert client.is_sleeping()
    assert used - resident_bytes(found.pid) > MIB, "its KV at least"
    assert client.wake_up(["weights"]) == ["kv_cache"]
    assert client.wake_up() == []
    assert not client.is_sleeping()
    (after,) = client.generate(PROMPT, GREEDY)
    assert after.outputs == before.outputs
    assert after.cached_tokens == 0


@pytest.mark.slow
def test_stream_waits_during_sleep_and_continues(client: Client) -> None:
    (expected,) = client.generate("Count", LONG)
    stream = client.stream("Count", LONG)
    text = next(stream).text
    try:
        assert client.sleep() == 1
        found = worker(client)
        assert found is not None
        assert (found.state, list(found.asleep)) == (admin_pb2.STATE_ASLEEP, ["kv_cache", "weights"])
    finally:
        client.wake_up()
    assert text + "".join(delta.text for delta in stream) == expected.text


def test_over_http_and_from_a_shell(client: Client, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    operator = httpx.Client(base_url=f"http://{cluster.http_address}", headers={"authorization": f"Bearer {KEY}"})
    with operator:
        assert operator.post("/sleep", params={"level": 2}).json()["status"] == "asleep"
        assert operator.get("/is_sleeping").json() == {"is_sleeping": True}
        assert httpx.get(f"http://{cluster.http_address}/health").status_code == 200, "nothing is wrong"
        woken = operator.post("/wake_up", params={"tags": "weights"}).json()
        assert woken == {"status": "asleep", "asleep": ["kv_cache"]}
        assert operator.post("/wake_up").json() == {"status": "awake", "asleep": []}
        assert operator.get("/is_sleeping").json() == {"is_sleeping": False}
        assert operator.post("/sleep", params={"level": 3}).status_code == 400
        assert operator.post("/pause", params={"mode": "wait"}).json()["status"] == "paused"
        assert operator.get("/is_paused").json() == {"is_paused": True}
        assert operator.post("/resume").json() == {"status": "resumed"}
        refused = operator.post("/update_weights_from_disk", json={"model_path": "x"})
        assert (refused.status_code, "weights_folders" in refused.text) == (409, True)
    assert main(["sleep", "--level", "2", "--address", cluster.grpc_address]) == 0
    assert main(["wake", "--address", cluster.grpc_address]) == 0
    assert capsys.readouterr().out == "all workers sleep; waiting sequences: 0\nall workers are awake\n"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_worker_killed_asleep_restarts_asleep(client: Client) -> None:
    (expected,) = client.generate("Count", GREEDY)
    client.sleep(2)
    found = worker(client)
    assert found is not None
    os.kill(found.pid, signal.SIGKILL)
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(client.generate("Count", GREEDY)[0].text))
    try:
        until(lambda: (now := worker(client)) is not None and now.pid != found.pid and bool(now.asleep))
        asking.start()
    finally:
        client.wake_up()
    asking.join()
    assert answers == [expected.text]
