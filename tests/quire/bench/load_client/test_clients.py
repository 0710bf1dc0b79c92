"""Client processes generate the requested load."""

from __future__ import annotations

import asyncio
import time
from array import array

import pytest

from quire.bench.load_client import arrivals
from quire.bench.load_client.clients import ClientPool
from quire.bench.load_client.timing import Received, RequestTiming
from quire.bench.workload.workloads import BenchRequest, Workload
from quire.shared.errors import Unavailable

TIMER_S = 0.002  # uvloop's timers are that early at most
WORK = Workload("test", tuple(BenchRequest((i,), 1) for i in range(12)))


class PatientCaller:
    """Sender whose calls take 20 ms and report as token count how many were in flight with them."""

    def __init__(self) -> None:
        self._in_flight = 0

    async def open(self) -> None:
        pass

    def body(self, item: BenchRequest) -> bytes:
        return str(item.prompt[0]).encode()

    async def call(self, body: bytes) -> tuple[RequestTiming, Received]:
        timing = RequestTiming(time.monotonic())
        self._in_flight += 1
        timing.num_tokens = self._in_flight
        await asyncio.sleep(0.02)
        self._in_flight -= 1
        timing.ended = time.monotonic()
        return timing, [(timing.ended, body)]

    def settle(self, timing: RequestTiming, received: Received) -> None:
        timing.arrivals = array("d", [at for at, _ in received])

    async def close(self) -> None:
        pass


class DyingCaller(PatientCaller):
    """Sender whose process exits at the first call."""

    async def call(self, body: bytes) -> tuple[RequestTiming, Received]:
        raise SystemExit(1)


def test_every_request_is_sent_once_within_the_limit() -> None:
    ended: list[int] = []
    with ClientPool(2, PatientCaller) as clients:
        limited = clients.run(WORK, arrivals.parse("4"), lambda done, _total: ended.append(done))
        burst = clients.run(WORK, arrivals.parse("burst"))
    assert max(timing.num_tokens for timing in limited.timings) == 2  # of the four, each process has two
    assert max(timing.num_tokens for timing in burst.timings) == 6
    assert len(limited.timings) == len(burst.timings) == 12
    assert all(len(timing.arrivals) == 1 for timing in limited.timings)
    assert all(timing.sent >= limited.begin - TIMER_S for timing in limited.timings)
    assert ended[-1] == 12


def test_a_rate_spreads_the_requests() -> None:
    with ClientPool(2, PatientCaller) as clients:
        outcome = clients.run(WORK, arrivals.parse("100/s"))
    due = arrivals.parse("100/s").offsets_s(12)
    late = [timing.sent - outcome.begin for timing in outcome.timings]
    assert all(sent >= offset - TIMER_S for sent, offset in zip(sorted(late), due, strict=True))


def test_a_client_that_dies_ends_the_bench() -> None:
    with (
        ClientPool(1, DyingCaller) as clients,
        pytest.raises(Unavailable, match="client process of the benchmark ended"),
    ):
        clients.run(WORK, arrivals.parse("burst"))
