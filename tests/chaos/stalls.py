"""Services that are stopped for a while at random moments, with streams open; nothing may be lost.

    python -m tests.chaos.stalls --rounds 50 --service frontend,worker,scheduler --seconds 1,7,20,40

A stopped process costs nothing, so several clusters are disturbed in parallel, each by one stall at a time. Every
stream must return the output of an undisturbed one, each token once. Afterwards the process must be the same one, its
sessions must be restored, its blocks owned, and its cache intact.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from quire.async_client import AsyncClient
from quire.cluster import Cluster
from quire.shared.errors import QuireError
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from tests import waiting
from tests.chaos.conftest import leaves_nothing_behind, services
from tests.chaos.paused_processes import pause_processes
from tests.chaos.streams import Stream, greedy, prompts
from tests.e2e.conftest import running_cluster
from tests.waiting import eventually

Said = tuple[dict[int, list[int]], dict[int, str], dict[int, str]]  # by sample: ids, text, finish

SERVICES = ("frontend", "worker", "scheduler")
SECONDS = (1.0, 7.0, 20.0, 40.0)
LATEST_MOMENT = 0.8  # of all tokens
END_S = 120.0  # after a stall, for streams and sessions
SETTINGS = {
    "worker": {"num_blocks": 4000, "threads": 1},
    "frontend": {"unavailable_after_s": 120},  # the default of 30 s ends what waits for a service stopped for 40
}


@dataclass(frozen=True, slots=True)
class Stall:
    """Stop of one service for some seconds; `number` determines the moment."""

    service: str
    seconds: float
    number: int


@dataclass(slots=True)
class Outcome:
    """Result of a stall."""

    stall: Stall
    faults: list[str] = field(default_factory=list)
    num_streams: int = 0
    num_stopped_midway: int = 0  # streams that were open when the service stopped
    pause_s: float = 0.0  # longest of any stream, the stall included
    back_s: float = 0.0  # after the stall, until the streams had ended and the sessions were back


class PatientClient(AsyncClient):
    """Client without keepalive pings, which would take the stopped frontend for dead after 20 s."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def connected(self) -> None:
        await self._channel.channel_ready()


class StallWorker:
    """One cluster, disturbed by one stall after the other."""

    def __init__(self, cluster: Cluster, num_streams: int) -> None:
        self._cluster = cluster
        self._prompts = prompts()[:num_streams]

    async def undisturbed(self) -> list[Said]:
        """Returns the outputs of the streams without disturbance."""
        client = PatientClient(self._cluster.grpc_address)
        streams = [Stream(prompt, greedy(0)) for prompt in self._prompts]
        await asyncio.gather(*(stream.run(client) for stream in streams))
        await client.close()
        assert not any(stream.error for stream in streams)
        return [stream.said for stream in streams]

    async def disturb(self, stall: Stall, said: Sequence[Said]) -> Outcome:
        outcome = Outcome(stall, num_streams=len(self._prompts))
        pids, cached = self._pids(), await asyncio.to_thread(self._num_cached)
        client = PatientClient(self._cluster.grpc_address)
        streams = [Stream(prompt, greedy(0)) for prompt in self._prompts]
        await client.connected()
        tasks = [asyncio.ensure_future(stream.run(client)) for stream in streams]
        await self._moment(stall, streams, said)
        outcome.num_stopped_midway = sum(not task.done() for task in tasks)
        await self._stop(stall)
        ended_s = time.monotonic()
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(*tasks)
                await asyncio.to_thread(self._await_sessions, outcome, ended_s)
            await asyncio.to_thread(leaves_nothing_behind, self._cluster)
        except (TimeoutError, AssertionError, QuireError) as error:
            outcome.faults.append(f"{type(error).__name__}: {error}")
        await client.close()
        outcome.faults += [f"stream: {stream.error!r}" for stream in streams if stream.error]
        outcome.faults += ["other text" for stream, want in zip(streams, said, strict=True) if stream.said != want]
        if self._pids() != pids:
            outcome.faults.append("another process")
        elif not outcome.faults and not await asyncio.to_thread(self._keeps, cached):
            outcome.faults.append(f"{cached} blocks cached before, fewer after")
        outcome.pause_s = max(stream.longest_gap_s for stream in streams)
        return outcome

    async def _moment(self, stall: Stall, streams: Sequence[Stream], said: Sequence[Said]) -> None:
        """Waits until the stall's number of tokens has arrived, which may be none."""
        share = random.Random(repr(stall)).uniform(0, LATEST_MOMENT)
        until = share * sum(len(ids) for token_ids, *_ in said for ids in token_ids.values())

        def have_come() -> bool:
            assert not any(stream.error for stream in streams)
            return sum(len(ids) for stream in streams for ids in stream.token_ids.values()) >= until

        await eventually(have_come)

    def _pids(self) -> list[int | None]:
        return [process.pid for process in self._cluster.processes]

    async def _stop(self, stall: Stall) -> None:
        pid = self._cluster.process(f"{stall.service}-0").pid
        assert pid is not None
        await pause_processes(stall.seconds, pid)

    def _workers(self) -> list[admin_pb2.ServiceStatus]:
        try:
            found = services(self._cluster.grpc_address).values()
        except QuireError:
            return []
        return [service for service in found if service.role == admin_pb2.ROLE_WORKER]

    def _num_cached(self) -> int:
        return sum(worker.blocks.cached for worker in self._workers())

    def _keeps(self, cached: int) -> bool:
        """Returns whether the cache is intact soon: a worker whose session has ended attaches again with its blocks."""
        deadline_s = time.monotonic() + 15
        while self._num_cached() < cached:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.1)
        return True

    def _await_sessions(self, outcome: Outcome, ended_s: float) -> None:
        """Waits until the frontend lists its scheduler, and the scheduler a ready worker."""
        waiting.until(
            lambda: any(worker.state == admin_pb2.STATE_READY for worker in self._workers()),
            ended_s + END_S - time.monotonic(),
            "the sessions do not come back",
        )
        outcome.back_s = time.monotonic() - ended_s


@asynccontextmanager
async def lanes(count: int, num_streams: int) -> AsyncIterator[list[StallWorker]]:
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            running = running_cluster(**SETTINGS)
            found.append(StallWorker(await asyncio.to_thread(running.__enter__), num_streams))
            stack.push_async_callback(asyncio.to_thread, running.__exit__, None, None, None)
        yield found


async def programme(stalls: Sequence[Stall], num_lanes: int, num_streams: int) -> list[Outcome]:
    """Runs all stalls in several clusters in parallel."""
    left = list(stalls)
    outcomes: list[Outcome] = []

    async def drive(lane: StallWorker, said: Sequence[Said]) -> None:
        while left:
            outcome = await lane.disturb(left.pop(), said)
            outcomes.append(outcome)
            if outcome.faults or len(outcomes) % 25 == 0:
                print(f"{len(outcomes)} of {len(stalls)}: {outcome}", file=sys.stderr, flush=True)

    async with lanes(num_lanes, num_streams) as found:
        said = await found[0].undisturbed()
        await asyncio.gather(*(drive(lane, said) for lane in found))
    return outcomes


def report(outcomes: Sequence[Outcome]) -> str:
    """Prints a table with a row for each service and duration."""
    heads = (
        "stopped",
        "for, s",
        "rounds",
        "streams, open",
        "longest pause, s",
        "all back after, s: median, most",
        "faults",
    )
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.stall.service, outcome.stall.seconds].append(outcome)
    for (service, seconds), group in sorted(groups.items()):
        back = [outcome.back_s for outcome in group]
        rows.append(
            f"| {service} | {seconds:g} | {len(group)} | {sum(o.num_streams for o in group)}, "
            f"{sum(o.num_stopped_midway for o in group)} | {max(o.pause_s for o in group):.1f} | "
            f"{statistics.median(back):.1f}, {max(back):.1f} | {sum(len(o.faults) for o in group)} |"
        )
    return "\n".join(rows)


def plan(services: Sequence[str], seconds: Sequence[float], rounds: int, seed: int = 0) -> list[Stall]:
    """Returns all stalls in random order."""
    stalls = [Stall(service, length, number) for service in services for length in seconds for number in range(rounds)]
    random.Random(seed).shuffle(stalls)
    return stalls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each service and time")
    parser.add_argument("--service", default=",".join(SERVICES))
    parser.add_argument("--seconds", default=",".join(f"{seconds:g}" for seconds in SECONDS))
    parser.add_argument("--clusters", type=int, default=6, help="side by side, each about 600 MB")
    parser.add_argument("--load", action="store_true", help="32 streams in each cluster instead of 4")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seconds = [float(part) for part in options.seconds.split(",")]
    stalls = plan(options.service.split(","), seconds, options.rounds, options.seed)
    outcomes = asyncio.run(programme(stalls, options.clusters, 32 if options.load else 4))
    print(report(outcomes))
    return any(outcome.faults for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
