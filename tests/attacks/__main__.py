"""Attacks a cluster of its own, or one that runs, and prints what others noticed of it, as a table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator

from quire.cluster import Cluster, ClusterOptions
from tests.attacks import holds
from tests.attacks.calls import Target
from tests.attacks.measure import HEADER, Outcome, measure
from tests.attacks.table import ATTACKS

HOLDS_HEADER = """\
| attack | answers | MB sent | the loop was held for at most, ms of its thread | memory, MB |
|---|---|---|---|---|"""


@contextlib.contextmanager
def target(http: str | None, grpc: str | None, pids: list[int]) -> Iterator[tuple[Target, list[int]]]:
    """Of what the command line names, else of a cluster with the bundled model."""
    if http is not None:
        yield Target(http, grpc or ""), pids
        return
    options = ClusterOptions(http_port=0, grpc_port=0, settings={"worker": {"num_blocks": 4000, "threads": 1}})
    with open(os.devnull, "w") as log, Cluster(options, log=log) as cluster:
        yield Target(cluster.http_address, cluster.grpc_address), [process.pid for process in cluster.processes]


async def print_holds(names: list[str]) -> None:
    print(HOLDS_HEADER, flush=True)
    async with holds.frontend() as where:
        for name in names:
            held = await holds.hold(name, where)
            statuses = ", ".join(f"{count} x {status}" for status, count in sorted(held.statuses.items()))
            sent, most = held.num_bytes / 1e6, held.growth.most / 1e6
            print(f"| {name} | {statuses} | {sent:.1f} | {held.longest_s * 1e3:.0f} | {most:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="attacks whose names hold this")
    parser.add_argument("--address", metavar="HOST:PORT", help="HTTP port of a frontend that runs")
    parser.add_argument("--grpc-address", metavar="HOST:PORT", help="its gRPC port")
    parser.add_argument("--pids", type=int, nargs="*", default=[], help="processes whose memory is looked at")
    parser.add_argument("--holds", action="store_true", help="measure the frontend's loop instead, by its own time")
    asked = parser.parse_args()
    names = [name for name in ATTACKS if not asked.only or asked.only in name]
    if asked.holds:
        asyncio.run(print_holds(names))
        return
    print(HEADER, flush=True)
    with target(asked.address, asked.grpc_address, asked.pids) as (where, pids):
        for name in names:
            outcome: Outcome = asyncio.run(measure(name, where, pids))
            print(outcome.row(), flush=True)
    print(f"load: {os.getloadavg()}", file=sys.stderr)


if __name__ == "__main__":
    main()
