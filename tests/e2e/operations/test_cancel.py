"""A client that goes away leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx

from quire import SamplingParams
from quire.client import Client
from quire.cluster import Cluster
from shared.pb.admin.v1 import admin_pb2

FOREVER = SamplingParams(temperature=1, max_tokens=3000, ignore_eos=True)
STREAM = """
import sys
from quire import Client, SamplingParams
for delta in Client(sys.argv[1]).stream("Count", SamplingParams(max_tokens=3000, ignore_eos=True)):
    print(delta.text, flush=True)
"""


def await_idle(client: Client) -> None:
    deadline = time.monotonic() + 60
    while True:
        worker = next(s for s in client.status() if s.role == admin_pb2.ROLE_WORKER)
        if worker.blocks.used == 0 and worker.running == 0 and worker.waiting == 0:
            return
        assert time.monotonic() < deadline, worker
        time.sleep(0.02)


def test_a_killed_grpc_client_frees_its_blocks(cluster: Cluster, client: Client) -> None:
    child = subprocess.Popen([sys.executable, "-c", STREAM, cluster.grpc_address], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        for _ in range(3):
            child.stdout.readline()
        child.kill()
        child.wait()
    await_idle(client)


def test_a_stream_that_is_left_early_frees_its_blocks(client: Client) -> None:
    stream = client.stream("Count", FOREVER)
    next(stream)
    stream.close()
    await_idle(client)


def test_a_closed_http_connection_frees_its_blocks(cluster: Cluster, client: Client) -> None:
    body = {"prompt": "Count", "max_tokens": 3000, "ignore_eos": True, "stream": True, "model": "quire-tiny"}
    with httpx.stream("POST", f"http://{cluster.http_address}/v1/completions", json=body) as response:
        assert response.status_code == 200
        next(response.iter_lines())
    await_idle(client)
