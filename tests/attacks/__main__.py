"""Runs attacks against a new or a running cluster and prints their effect on other clients as a table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from quire.cluster import Cluster, ClusterOptions
from tests.attacks import holds
from tests.attacks.calls import ATTACKER, BYSTANDER, Post, Target
from tests.attacks.measure import HEADER, Outcome, measure
from tests.attacks.table import ATTACKS

HOLDS_HEADER = """\
| attack | answers | MB sent | the loop was held for at most, ms of its thread: by one piece, ten turns | memory, MB |
|---|---|---|---|---|"""


TENANTS = {"attacker": ATTACKER, "bystander": BYSTANDER}
NUM_BLOCKS = 4000
BLOCK_SIZE = 16
PROMPT_TOKENS = 4000


async def fill(http: str) -> None:
    """Writes every KV block once, so that memory reserved for them does not count as an attack's growth."""
    for number in range(-(-NUM_BLOCKS * BLOCK_SIZE // PROMPT_TOKENS) + 1):
        ids = [(number * 7919 + place * 31) % 200 for place in range(PROMPT_TOKENS)]
        body = json.dumps({"prompt": ids, "max_tokens": 1}).encode()
        status = await Post("/v1/completions", body).send(Target(http, ""))
        assert status == "200", status


def measured(name: str, where: Target, pids: list[int], times: int) -> Outcome:
    """Returns the median of several runs, by how long the bystander waited."""
    outcomes = [asyncio.run(measure(name, where, pids)) for _ in range(times)]
    return sorted(outcomes, key=lambda outcome: outcome.later)[times // 2]


def _cluster(folder: str, log: IO[str]) -> Cluster:
    """Starts a cluster with API keys of two tenants, which share it fairly."""
    keys = Path(folder, "keys.yaml")
    entries = [{"name": tenant, "tenant": tenant, "key": key} for tenant, key in TENANTS.items()]
    keys.write_text(json.dumps({"keys": entries}))
    keys.chmod(0o600)
    settings = {
        "frontend": {"api_keys": str(keys)},
        "scheduler": {"scheduling_policy": "fair"},
        "worker": {"num_blocks": NUM_BLOCKS, "threads": 1},
    }
    return Cluster(ClusterOptions(http_port=0, grpc_port=0, settings=settings), log=log)


@contextlib.contextmanager
def target(http: str | None, grpc: str | None, pids: list[int]) -> Iterator[tuple[Target, list[int]]]:
    """Yields the services named on the command line, or a new cluster with the bundled model."""
    if http is not None:
        yield Target(http, grpc or ""), pids
        return
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as log, _cluster(folder, log) as cluster:
        asyncio.run(fill(cluster.http_address))
        yield Target(cluster.http_address, cluster.grpc_address), [process.pid for process in cluster.processes]


async def print_holds(names: list[str]) -> None:
    print(HOLDS_HEADER, flush=True)
    async with holds.frontend() as where:
        for name in names:
            held = await holds.hold(name, where)
            statuses = ", ".join(f"{count} x {status}" for status, count in sorted(held.statuses.items()))
            sent, most = held.num_bytes / 1e6, held.growth.most / 1e6
            times = f"{held.longest_s * 1e3:.0f}, {held.longest_turns_s * 1e3:.0f}"
            print(f"| {name} | {statuses} | {sent:.1f} | {times} | {most:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="attacks whose names hold this")
    parser.add_argument("--address", metavar="HOST:PORT", help="HTTP port of a frontend that runs")
    parser.add_argument("--grpc-address", metavar="HOST:PORT", help="its gRPC port")
    parser.add_argument("--pids", type=int, nargs="*", default=[], help="processes whose memory is looked at")
    parser.add_argument("--times", type=int, default=1, help="how often each: the one in the middle is shown")
    parser.add_argument("--holds", action="store_true", help="measure the frontend's loop instead, by its own time")
    asked = parser.parse_args()
    names = [name for name in ATTACKS if not asked.only or asked.only in name]
    if asked.holds:
        asyncio.run(print_holds(names))
        return
    print(HEADER, flush=True)
    with target(asked.address, asked.grpc_address, asked.pids) as (where, pids):
        for name in names:
            print(measured(name, where, pids, asked.times).row(), flush=True)
    print(f"load: {os.getloadavg()}", file=sys.stderr)


if __name__ == "__main__":
    main()
