"""Measures refusals and accepted calls at ten times the capacity of a frontend.

python -m tests.services.frontend.load.overload [--seconds 5] [--times 10] [--edge http|grpc] [--step-ms 10]

The frontend is a separate process; the scripted scheduler and the clients share this one. Calls start at fixed times,
independently of earlier ones. Latencies are the clients': from sending to the refusal, or to the end of the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import uvloop

from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.test_process import process, ready
from tests.services.frontend.tiny_folder import write_folder

PLACES = 16
TOKENS = 20
PROMPT = "hello world " * 40


@dataclass
class Latencies:
    """Latencies in seconds."""

    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    hints: set[str] = field(default_factory=set)  # values of retry-after

    def line(self) -> str:
        return (
            f"{len(self.accepted)} accepted, p50 {at(self.accepted, 0.5) * 1e3:.0f} ms, p99 "
            f"{at(self.accepted, 0.99) * 1e3:.0f} ms; {len(self.refused)} refused, p50 "
            f"{at(self.refused, 0.5) * 1e3:.1f} ms, p99 {at(self.refused, 0.99) * 1e3:.1f} ms, "
            f"longest {max(self.refused, default=0) * 1e3:.1f} ms"
        )


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


class HttpClients:
    """Reused connections on plain sockets: an HTTP library would be slower than what it measures."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        body = json.dumps({"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        self._message = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, latencies: Latencies) -> None:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, int(self._port))
        started_s = time.perf_counter()
        writer.write(self._message)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        await reader.readexactly(int(headers["content-length"]))
        status = int(head.split()[1])
        assert status in (200, 429), head
        (latencies.accepted if status == 200 else latencies.refused).append(time.perf_counter() - started_s)
        if status == 429:
            latencies.hints.add(headers["retry-after"])
        self._idle.append((reader, writer))

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
            await writer.wait_closed()


class GrpcClients:
    """Calls over a few channels."""

    def __init__(self, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(4)]
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self._request = pb.GenerateRequest(text=PROMPT)
        self._request.sampling.max_tokens = TOKENS
        self._request.sampling.ignore_eos = True
        self._request.options.final_only = True
        self._next = 0

    async def ask(self, latencies: Latencies) -> None:
        self._next += 1
        started_s = time.perf_counter()
        try:
            async for _ in self._stubs[self._next % len(self._stubs)].Generate(self._request):
                pass
            latencies.accepted.append(time.perf_counter() - started_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            latencies.refused.append(time.perf_counter() - started_s)
            latencies.hints.update(key for key, _ in error.trailing_metadata() or ())

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


EDGES: dict[str, type[HttpClients] | type[GrpcClients]] = {"http": HttpClients, "grpc": GrpcClients}


async def offer(ask: Callable[[Latencies], Awaitable[None]], rate: float, seconds: float) -> Latencies:
    """Starts calls at an even `rate`, in calls per second."""
    loop = asyncio.get_running_loop()
    latencies, start_s = Latencies(), loop.time()
    async with asyncio.TaskGroup() as calls:
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, start_s + number / rate - loop.time()))
            calls.create_task(ask(latencies))  # type: ignore[arg-type]
    return latencies


async def measure(folder: Path, edge: str, times: float, seconds: float, step_s: float) -> tuple[Latencies, Latencies]:
    """Returns measurements at half and at `times` the capacity, where a token takes `step_s`."""
    fitting = PLACES / (TOKENS * step_s)  # requests per second
    script = ScriptedScheduler(lambda _: 65, step_s=step_s)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(scheduler(script))
        settings = {"max_inflight_requests": PLACES, "retry_after_ms": 1500}
        where = await ready(await stack.enter_async_context(process(folder, script.address, **settings)))
        await script.until(lambda: script.sessions)
        clients = EDGES[edge](where[edge])
        stack.push_async_callback(clients.close)
        await offer(clients.ask, fitting / 2, 0.5)
        calm = await offer(clients.ask, fitting / 2, seconds)
        return calm, await offer(clients.ask, fitting * times, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--times", type=float, default=10)
    parser.add_argument("--edge", choices=EDGES, default="http")
    parser.add_argument("--step-ms", type=float, default=10)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_folder(Path(scratch) / "tiny")
        calm, crowded = uvloop.run(measure(folder, asked.edge, asked.times, asked.seconds, asked.step_ms / 1e3))
    print(f"{asked.edge} at half of what fits: {calm.line()}")
    print(f"{asked.edge} at {asked.times:g} times what fits: {crowded.line()}")


if __name__ == "__main__":
    main()
