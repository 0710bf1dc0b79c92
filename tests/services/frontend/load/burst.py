"""Measures the latency of many calls at one instant, from a separate process, until their answers or refusals.

python -m tests.services.frontend.load.burst [--calls 1280] [--places 128] [--held] [--prompt-bytes 480]

python -m tests.services.frontend.load.burst --calls 12800 --rate 1280 --tokens 100  # ten times the capacity

The frontend, the clients and the scripted scheduler are a process each. Every call has a separate connection, or with
`--held` one that was opened before. Latencies are the client's, from before its connect (or write) to the answer's
first byte; with `--rate`, calls are started at fixed times, independently of earlier ones, and latencies count from the
scheduled time. `/health` is polled meanwhile on a separate connection, as a measure of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.services.frontend.load.overload import at
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.test_process import process, ready
from tests.services.frontend.tiny_folder import write_folder

TOKENS = 20
STEP_S = 0.01
GIVE_UP_S = 60.0
HEALTH_EVERY_S = 0.005
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass
class Call:
    """Connection with one request."""

    sock: socket.socket
    message: bytes
    begun_s: float = 0.0


@dataclass
class Burst:
    """Latencies in seconds."""

    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def record(self, answer: bytes, took_s: float) -> None:
        match answer[9:12]:
            case b"200":
                self.accepted.append(took_s)
            case b"429":
                self.refused.append(took_s)
            case _:
                self.others.append(answer[:80].decode("latin-1"))

    def line(self) -> str:
        def summary(name: str, values: list[float]) -> str:
            p50, p99 = at(values, 0.5) * 1e3, at(values, 0.99) * 1e3
            return f"{len(values)} {name} p50 {p50:.1f} p99 {p99:.1f} max {max(values, default=0) * 1e3:.1f} ms"

        parts = (summary("accepted", self.accepted), summary("refused", self.refused), summary("health", self.health))
        return "; ".join(parts) + (f"; others: {self.others[:3]}" if self.others else "")


def message(prompt_bytes: int, tokens: int = TOKENS) -> bytes:
    body = json.dumps({"prompt": "hello wo" * (prompt_bytes // 8), "max_tokens": tokens, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class ScheduledCalls:
    """Client that starts calls at their scheduled times, each on a separate connection that is closed after the
    answer."""

    def __init__(self, host: str, port: int, messages: Sequence[bytes]) -> None:
        """Creates a client; `messages`: sent in turn."""
        self._where, self._messages = (host, port), itertools.cycle(messages)
        self._poll = select.epoll()
        self._calls: dict[int, Call] = {}
        self.burst = Burst()

    def run(self, num_calls: int, rate: float) -> Burst:
        clock = time.perf_counter
        started_s, begun = clock(), 0
        while (begun < num_calls or self._calls) and clock() - started_s < GIVE_UP_S:
            while begun < num_calls and started_s + begun / rate <= clock():
                self._begin(started_s + begun / rate)
                begun += 1
            wait_s = max(0.0, started_s + begun / rate - clock()) if begun < num_calls else HEALTH_EVERY_S
            for number, events in self._poll.poll(wait_s, maxevents=64):
                self._advance(number, events, clock)
        return self.burst

    def _begin(self, due_s: float) -> None:
        call = Call(socket.socket(), next(self._messages), due_s)
        call.sock.setblocking(False)
        call.sock.connect_ex(self._where)
        self._calls[call.sock.fileno()] = call
        self._poll.register(call.sock, select.EPOLLOUT)

    def _advance(self, number: int, events: int, clock: Callable[[], float]) -> None:
        call = self._calls[number]
        if not events & select.EPOLLIN:
            call.sock.send(call.message)
            self._poll.modify(number, select.EPOLLIN)
            return
        answer, took_s = call.sock.recv(1 << 16), clock() - call.begun_s
        self.burst.record(answer, took_s)
        del self._calls[number]
        self._poll.unregister(number)
        call.sock.close()


def strike(host: str, port: int, num_calls: int, sent: bytes, *, held: bool) -> Burst:
    """Sends all calls at once, on plain sockets with one epoll: a client library would be slower than what it
    measures."""
    poll, calls = select.epoll(), [Call(socket.socket(), sent) for _ in range(num_calls)]
    by_number = {call.sock.fileno(): call for call in calls}
    for call in calls:
        if held:
            call.sock.connect((host, port))
            poll.register(call.sock, select.EPOLLIN)
        call.sock.setblocking(False)
    probe = Call(socket.create_connection((host, port)), HEALTH)
    by_number[probe.sock.fileno()] = probe
    poll.register(probe.sock, select.EPOLLIN)
    burst, clock = Burst(), time.perf_counter
    started_s = clock()
    probe.begun_s = clock()
    probe.sock.send(HEALTH)
    for call in calls:
        call.begun_s = clock()
        if held:
            call.sock.send(sent)
        else:
            call.sock.connect_ex((host, port))
            poll.register(call.sock, select.EPOLLOUT)
    left, next_probe_s = num_calls, math.inf
    while left and clock() - started_s < GIVE_UP_S:
        if clock() >= next_probe_s:
            probe.begun_s, next_probe_s = clock(), math.inf
            probe.sock.send(HEALTH)
        for number, events in poll.poll(HEALTH_EVERY_S, maxevents=64):
            call = by_number[number]
            if not events & select.EPOLLIN:
                call.sock.send(sent)
                poll.modify(number, select.EPOLLIN)
                continue
            answer, took_s = call.sock.recv(1 << 16), clock() - call.begun_s
            if call is probe:
                burst.health.append(took_s)
                next_probe_s = clock() + HEALTH_EVERY_S
                continue
            left -= 1
            poll.unregister(number)
            burst.record(answer, took_s)
    for call in (*calls, probe):
        call.sock.close()
    return burst


async def measure(folder: Path, places: int, *asked: Any) -> Burst:
    """Measures a burst; `asked`: arguments of _client() after the address."""
    script = ScriptedScheduler(lambda _: 65, step_s=STEP_S)
    settings: dict[str, Any] = {"max_inflight_requests": places, "retry_after_ms": 1500, "log_level": "warning"}
    async with scheduler(script), process(folder, script.address, **settings) as frontend:
        where = await ready(frontend)
        await script.until(lambda: script.sessions)
        await strike_from_outside(where["http"], 4, 480, TOKENS, True, 0.0)
        return await strike_from_outside(where["http"], *asked)


async def strike_from_outside(*asked: Any) -> Burst:
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __spec__.name, "--client", json.dumps(asked), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await client.communicate()
    return Burst(**json.loads(output))


def _client(address: str, num_calls: int, prompt_bytes: int, tokens: int, held: bool, rate: float) -> Burst:
    host, _, port = address.rpartition(":")
    if rate:  # answers of many lengths: equal ones would repeatedly end all at once
        chance = random.Random(num_calls)
        messages = [message(prompt_bytes, chance.randint(tokens // 2, tokens * 3 // 2)) for _ in range(997)]
        return ScheduledCalls(host, int(port), messages).run(num_calls, rate)
    return strike(host, int(port), num_calls, message(prompt_bytes, tokens), held=held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1280)
    parser.add_argument("--places", type=int, default=128)
    parser.add_argument("--prompt-bytes", type=int, default=480)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of an answer, 10 ms each; with --rate, on average")
    parser.add_argument("--rate", type=float, default=0.0, help="calls a second; 0: all at one instant")
    parser.add_argument("--held", action="store_true", help="connections are open before")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client:
        print(json.dumps(vars(_client(*json.loads(asked.client)))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_folder(Path(scratch) / "tiny")
        for _ in range(asked.runs):
            how = (asked.calls, asked.prompt_bytes, asked.tokens, asked.held, asked.rate)
            burst = asyncio.run(measure(folder, asked.places, *how))
            print(burst.line(), flush=True)


if __name__ == "__main__":
    main()
