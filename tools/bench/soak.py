"""`python -m tools.bench soak`: hours of mixed load, and the growth of resources meanwhile.

Complete streams, several samples, constrained answers, cancelled calls, broken connections and refused requests; a
worker is killed now and then. Prints a row for each process that lived long enough: memory, descriptors and threads
at the settled beginning and at the end, with slopes and their confidence; and the KV blocks that no sequence owned,
during the run and at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from quire.async_client import AsyncClient
from quire.bench import target
from quire.bench.report import Row, progress
from quire.bench.workload import shapes
from quire.cluster import Cluster
from quire.flags.parser import CommandParser
from quire.flags.setting_flags import human_int
from quire.metrics import Gauge, parse
from quire.params import SamplingParams, StructuredOutput
from quire.shared.errors import Internal, InvalidArgument, QuireError
from tools.bench.measuring import growth

LOOKS = 360  # samples of the processes, at most one per second
LOOKS_AGAIN = 3  # samples to confirm unowned blocks
MAX_PATIENCE_S = 0.2  # before a client cancels
UNOWNED = "quire_scheduler_blocks_unowned"
BUSY = ("vllm:num_requests_running", "quire_frontend_inflight_requests")
COUNTED = (UNOWNED, *BUSY)
WORDS = ("lighthouse", "keeper", "storm", "boat", "harbour", "lamp", "night", "letter", "island", "bell")
REGEX = r"[a-z]{3,12} [0-9]{1,4}"


@dataclass(slots=True)
class Record:
    """Observations of a run."""

    looks: dict[tuple[str, int], list[growth.ProcessSample]] = field(default_factory=dict)  # by service and process id
    done: Counter[str] = field(default_factory=Counter)  # calls by kind
    errors: Counter[str] = field(default_factory=Counter)  # unprovoked errors
    kills: int = 0
    unowned: list[tuple[float, int]] = field(default_factory=list)  # (seconds, KV blocks)


def configure(parser: CommandParser) -> None:
    """Adds the target's flags, the duration, the clients and the interval between kills."""
    target.configure(parser)
    parser.set_defaults(workers=2)
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="duration of the load, minutes")
    parser.add_argument("--clients", type=human_int, default=16, help="concurrent clients")
    parser.add_argument(
        "--pause-s", type=float, default=0.0, metavar="S", help="pause of a client between two calls, seconds"
    )
    parser.add_argument(
        "--kill-every-s",
        type=float,
        default=60.0,
        metavar="S",
        help="interval between kills of a worker, seconds; 0: none",
    )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Runs the load and yields rows: growth per process, totals, calls by kind, and errors by text."""
    with tempfile.TemporaryDirectory() as scratch:
        shape = shapes.prepare(arguments.model, Path(scratch))
        with Cluster(target.cluster_options(arguments, shape), report=progress) as cluster:
            record = asyncio.run(_soak(cluster, arguments))
            unowned = asyncio.run(_unowned_when_idle(cluster))
    seconds = 60 * arguments.minutes
    calls = sum(record.done.values())
    for (service, pid), looks in sorted(record.looks.items()):
        grown = growth.process_growth(looks, seconds, calls)
        if grown:
            yield {"service": service, "pid": pid, **grown}
    yield {
        "service": "all",
        "calls": calls,
        "errors": sum(record.errors.values()),
        "kills": record.kills,
        "unowned_blocks": unowned,
        **growth.block_growth(record.unowned, seconds),
    }
    for kind, count in sorted(record.done.items()):
        yield {"service": f"calls: {kind}", "calls": count}
    for text, count in sorted(record.errors.items()):
        yield {"service": f"error: {text}", "errors": count}


async def _soak(cluster: Cluster, arguments: argparse.Namespace) -> Record:
    """Runs clients, kills and samples of resources at once until the end, and returns their record."""
    record, begin_s, seconds = Record(), time.monotonic(), 60 * arguments.minutes
    async with contextlib.AsyncExitStack() as stack:
        client = AsyncClient(cluster.grpc_address)
        stack.push_async_callback(client.close)
        callers = Callers(client, cluster, record, arguments.pause_s)
        end_s = begin_s + seconds
        tasks = [asyncio.create_task(callers.run(random.Random(seed), end_s)) for seed in range(arguments.clients)]
        if arguments.kill_every_s:
            tasks.append(asyncio.create_task(_kill(cluster, record, arguments.kill_every_s, end_s)))
        tasks.append(asyncio.create_task(_watch(cluster, record, begin_s, seconds)))
        await asyncio.gather(*tasks)
    return record


async def _watch(cluster: Cluster, record: Record, begin_s: float, seconds: float) -> None:
    """Samples resources of all ready processes and unowned blocks LOOKS times over the duration."""
    while (at_s := time.monotonic() - begin_s) < seconds:
        for process in cluster.processes:
            look = growth.ProcessSample.of(process.pid, at_s) if process.pid else None
            if look is not None and process.ready.is_set():
                record.looks.setdefault((process.spec.id, process.pid or 0), []).append(look)
        record.unowned.append((at_s, await _unowned_now(cluster)))
        await asyncio.sleep(max(1.0, seconds / LOOKS))


async def _kill(cluster: Cluster, record: Record, every_s: float, end_s: float) -> None:
    """Kills the last worker repeatedly; never the first, so that its memory is observed over the whole time."""
    while time.monotonic() + every_s < end_s:
        await asyncio.sleep(every_s)
        victim = [process for process in cluster.processes if process.spec.role == "worker"][-1]
        if victim.ready.is_set() and victim.running:
            victim.signal(signal.SIGKILL)
            record.kills += 1


async def _unowned_now(cluster: Cluster) -> int:
    """Returns the minimum of several samples, because a page is read while steps run and may combine two states."""
    least = (await _gauges(cluster))[UNOWNED]
    for _ in range(LOOKS_AGAIN):
        if not least:
            break
        await asyncio.sleep(0.1)
        least = min(least, (await _gauges(cluster))[UNOWNED])
    return least


async def _unowned_when_idle(cluster: Cluster) -> int:
    """Returns the blocks that no live sequence owns when nothing runs, summed over the schedulers."""
    for _ in range(50):
        gauges = await _gauges(cluster)
        if not any(gauges[name] for name in BUSY):
            return gauges[UNOWNED]
        await asyncio.sleep(0.2)
    raise Internal("sequences are still running although every client has disconnected")


async def _gauges(cluster: Cluster) -> Counter[str]:
    """Reads the cluster's metrics page and returns the gauges of COUNTED, summed over the services."""
    assert cluster.metrics is not None
    sums: Counter[str] = Counter()
    for metric in parse(await asyncio.to_thread(cluster.metrics.text)):
        if isinstance(metric, Gauge) and metric.name in COUNTED:
            sums[metric.name] += int(metric.value)
    return sums


class Callers:
    """Client behaviours by name, run in rounds: each once, in a new order every time."""

    def __init__(self, client: AsyncClient, cluster: Cluster, record: Record, pause_s: float) -> None:
        self._pause_s = pause_s
        self._client = client
        self._cluster = cluster
        self._record = record
        self._kinds: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "stream": self._stream,
            "samples": self._samples,
            "constrained": self._constrained,
            "cancelled": self._cancelled,
            "broken off": self._broken_off,
            "refused": self._refused,
        }

    async def run(self, draw: random.Random, end_s: float) -> None:
        """Makes calls of all kinds in random order until `end_s` (monotonic seconds); errors are counted by text and
        do not end it."""
        left: list[str] = []
        while time.monotonic() < end_s:
            left = left or draw.sample(list(self._kinds), len(self._kinds))
            kind = left.pop()
            try:
                await self._kinds[kind](draw)
                self._record.done[kind] += 1
            except (QuireError, grpc.RpcError, OSError) as error:
                self._record.errors[f"{kind}: {type(error).__name__}: {str(error)[:60]}"] += 1
            await asyncio.sleep(self._pause_s)

    async def _stream(self, draw: random.Random) -> None:
        async for _ in self._client.stream(_prompt(draw), _params(draw)):
            pass

    async def _samples(self, draw: random.Random) -> None:
        await self._client.generate(_prompt(draw), _params(draw, n=3))

    async def _constrained(self, draw: random.Random) -> None:
        await self._client.generate(_prompt(draw), _params(draw, regex=REGEX))

    async def _cancelled(self, draw: random.Random) -> None:
        """Starts a stream and cancels it at a random time, after some tokens or before the first."""
        call = asyncio.create_task(self._stream(draw))
        await asyncio.sleep(draw.random() * MAX_PATIENCE_S)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call

    async def _broken_off(self, draw: random.Random) -> None:
        """Aborts the HTTP connection of a stream after a random number of received bytes."""
        host, port = self._cluster.http_address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"model": "%s", "prompt": "Once", "max_tokens": 200, "stream": true, "ignore_eos": true}'
        body %= self._cluster.options.model_name.encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await reader.read(draw.randrange(1, 2000))
        writer.transport.abort()

    async def _refused(self, draw: random.Random) -> None:
        """Sends a request that must be refused; raises Internal if it is accepted."""
        try:
            await self._client.generate(_prompt(draw), SamplingParams(temperature=-1.0))
        except InvalidArgument:
            return
        raise Internal("a request with a negative temperature was accepted")


def _prompt(draw: random.Random) -> str:
    """Returns a prompt; some are long, many share prefixes."""
    return "The lighthouse keeper " * draw.choice((0, 4, 20)) + " ".join(draw.choices(WORDS, k=draw.randrange(1, 30)))


def _params(draw: random.Random, n: int = 1, regex: str = "") -> SamplingParams:
    constraint = StructuredOutput(regex=regex) if regex else None
    return SamplingParams(max_tokens=draw.randrange(1, 80), temperature=0.8, n=n, structured_output=constraint)
