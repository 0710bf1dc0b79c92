"""`quire demo`: starts a cluster, runs two chats, prints its status, and shuts down."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Iterator

from quire.cli.chat import answer
from quire.cli.status import table
from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from quire.flags.setting_flags import human_int
from quire.params import SamplingParams
from quire.shared.settings import SERVICES

QUESTIONS = ("Hello! Who are you?", "What is 23 + 45?")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=human_int, default=1, help="worker processes")


def run(arguments: argparse.Namespace) -> int:
    """Starts a cluster with the bundled model, asks one question over gRPC and one over HTTP, and prints the status
    table."""
    begin = time.monotonic()
    print("starting a frontend, a scheduler and a worker on the CPU, with the bundled model ...", flush=True)
    quiet = {service: {"log_level": "warning"} for service in SERVICES}
    options = ClusterOptions(workers=arguments.workers, http_port=0, grpc_port=0, settings=quiet)
    with Cluster(options) as cluster:
        print(f"ready after {time.monotonic() - begin:.1f} s: http={cluster.http_address} grpc={cluster.grpc_address}")
        with Client(cluster.grpc_address) as client:
            print(f"\ngRPC> {QUESTIONS[0]}")
            answer(client, [{"role": "user", "content": QUESTIONS[0]}], SamplingParams(temperature=0, max_tokens=64))
            print(f"\nOpenAI HTTP> {QUESTIONS[1]}")
            for text in stream_over_http(cluster.http_address, QUESTIONS[1]):
                print(text, end="", flush=True)
            print(f"\n\n{table(client.status())}\n\ndraining ...", flush=True)
    print(f"done after {time.monotonic() - begin:.1f} s")
    return 0


def stream_over_http(address: str, question: str) -> Iterator[str]:
    """Yields the answer's text as it arrives, from /v1/chat/completions with only the standard library."""
    body = {
        "model": "quire-tiny",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"].get("content") or ""
