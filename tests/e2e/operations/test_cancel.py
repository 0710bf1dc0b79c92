"""A client that disconnects leaves no sequence and no block behind."""

from __future__ import annotations

import subprocess
import sys

import httpx

from quire import SamplingParams
from quire.client import Client
from quire.cluster import Cluster
from tests.waiting import until_idle

FOREVER = SamplingParams(temperature=1, max_tokens=3000, ignore_eos=True)
STREAM = """
import sys
from quire import Client, SamplingParams
for delta in Client(sys.argv[1]).stream("Count", SamplingParams(max_tokens=3000, ignore_eos=True)):
    print(delta.text, flush=True)
"""


def test_a_killed_grpc_client_frees_its_blocks(cluster: Cluster, client: Client) -> None:
    child = subprocess.Popen([sys.executable, "-c", STREAM, cluster.grpc_address], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        for _ in range(3):
            child.stdout.readline()
        child.kill()
        child.wait()
    until_idle(client)


def test_a_stream_that_is_left_early_frees_its_blocks(client: Client) -> None:
    stream = client.stream("Count", FOREVER)
    next(stream)
    stream.close()
    until_idle(client)


def test_a_closed_http_connection_frees_its_blocks(cluster: Cluster, client: Client) -> None:
    body = {"prompt": "Count", "max_tokens": 3000, "ignore_eos": True, "stream": True, "model": "quire-tiny"}
    with httpx.stream("POST", f"http://{cluster.http_address}/v1/completions", json=body) as response:
        assert response.status_code == 200
        next(response.iter_lines())
    until_idle(client)
