"""Client processes, as many as needed so that the clients do not limit the measurement."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol

import uvloop

from quire.bench.load_client.arrivals import ArrivalPattern
from quire.bench.load_client.timing import LoadResult, Received, RequestTiming
from quire.bench.workload.workloads import BenchRequest, Workload
from quire.shared.errors import Unavailable

HEAD_START_S = 0.05  # for the start signal to reach every client
POLL_S = 0.2
BUSY = 0.85  # CPU share from which on the client may limit the measurement

Progress = Callable[[int, int], None]  # (ended requests, all requests)


class RequestSender(Protocol):
    """Sends requests over one protocol; lives in one client process."""

    async def open(self) -> None:
        """Prepares the sender; called before the load starts."""

    def body(self, item: BenchRequest) -> bytes:
        """Builds a request; called before the load starts, so that it is not measured."""

    async def call(self, body: bytes) -> tuple[RequestTiming, Received]:
        """Sends a request; never raises for a failed one."""

    def settle(self, timing: RequestTiming, received: Received) -> None:
        """Parses the received data into `timing`, after the load has ended."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """Requests of one client and their times."""

    items: Sequence[BenchRequest]
    offsets_s: Sequence[float]
    in_flight: int  # 0: no limit


class ClientPool:
    """Pool of client processes: `with ClientPool(count, new_caller) as clients: clients.run(...)`. Connections stay
    open between runs.

    `new_caller` is called inside each process, on its loop, so it must be picklable.
    """

    def __init__(self, count: int, new_caller: Callable[[], RequestSender]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ended: Any = context.Array("i", count)
        self._pipes: list[Connection] = []
        self._processes = []
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_play, args=(theirs, new_caller, self._ended, index), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, work: Workload, arrivals: ArrivalPattern, progress: Progress | None = None) -> LoadResult:
        """Sends the requests of `work` as `arrivals` says; returns when all have ended."""
        pipes = self._pipes[: arrivals.most_clients(len(self._pipes))]
        offsets = arrivals.offsets_s(len(work.items))
        for i, pipe in enumerate(pipes):
            share = slice(i, None, len(pipes))
            pipe.send(Job(work.items[share], offsets[share], arrivals.share(i, len(pipes))))
        for pipe in pipes:
            pipe.recv()  # the client has prepared its requests
        begin = time.monotonic() + HEAD_START_S
        for pipe in pipes:
            pipe.send(begin)
        answers = self._collect(pipes, len(work.items), progress)
        timings = [timing for part, _ in answers for timing in part]
        return LoadResult(begin, work.num_prompt_tokens, timings, [cpu for _, cpu in answers])

    def close(self) -> None:
        """Closes the pipes, which ends the client processes, and kills those that have not ended within 5 s."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> ClientPool:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def _collect(
        self, pipes: Sequence[Connection], total: int, progress: Progress | None
    ) -> list[tuple[list[RequestTiming], float]]:
        """Waits for one result per pipe and reports progress meanwhile; raises Unavailable if a client process dies."""
        answers, open_pipes = [], list(pipes)
        while open_pipes:
            for pipe in wait(open_pipes, POLL_S):
                assert isinstance(pipe, Connection)
                try:
                    answers.append(pipe.recv())
                except EOFError:
                    raise Unavailable(
                        "a client process of the benchmark ended unexpectedly; its error is printed above"
                    ) from None
                open_pipes.remove(pipe)
            if progress:
                progress(sum(self._ended), total)
        return answers


def default_count() -> int:
    """Returns half of the number of cores, at most 8: the services need the rest."""
    return max(1, min(8, (os.cpu_count() or 1) // 2))


def _play(pipe: Connection, new_caller: Callable[[], RequestSender], ended: Any, index: int) -> None:
    """Runs one client process until the parent closes its pipe."""

    async def play() -> None:
        await _Player(pipe, new_caller(), ended, index).play()

    with contextlib.suppress(EOFError, KeyboardInterrupt):  # the parent has closed the pipe
        uvloop.run(play())


class _Player:
    """Main loop of a client process: receives a job, waits for the start signal, sends the outcome."""

    def __init__(self, pipe: Connection, caller: RequestSender, ended: Any, index: int) -> None:
        self._pipe = pipe
        self._caller = caller
        self._ended = ended
        self._index = index

    async def play(self) -> None:
        """Opens the caller and runs one job after the other; ends with EOFError when the parent closes the pipe."""
        try:
            await self._caller.open()
            while True:
                await self._play_one(await self._receive())
        finally:
            await self._caller.close()

    async def _receive(self) -> Any:
        """Waits for the next message in a thread, because the event loop serves the connections."""
        return await asyncio.get_running_loop().run_in_executor(None, self._pipe.recv)

    async def _play_one(self, job: Job) -> None:
        """Runs one job: encodes the bodies, reports "ready", waits for the common start, sends, and returns the
        timings and this process's share of a CPU. Answers are parsed only after all have ended."""
        bodies = [self._caller.body(item) for item in job.items]
        self._ended[self._index] = 0
        self._pipe.send("ready")
        begin = await self._receive()
        cpu = time.process_time()
        answers = await self._send_all(bodies, job, begin)
        cpu = time.process_time() - cpu
        share = cpu / max(1e-9, time.monotonic() - begin)
        for timing, received in answers:
            self._caller.settle(timing, received)
        self._pipe.send(([timing for timing, _ in answers], share))

    async def _send_all(self, bodies: Sequence[bytes], job: Job, begin: float) -> list[tuple[RequestTiming, Received]]:
        """Sends all bodies at their offsets in seconds from `begin`, at most `in_flight` at a time, and returns
        timings and unparsed answers in order."""
        gate = asyncio.Semaphore(job.in_flight or len(bodies))

        async def send(body: bytes, offset_s: float) -> tuple[RequestTiming, Received]:
            """Sends one body at its offset, or later if all places are in use, and counts it for the progress."""
            await asyncio.sleep(begin + offset_s - time.monotonic())
            async with gate:
                answer = await self._caller.call(body)
            self._ended[self._index] += 1
            return answer

        return await asyncio.gather(*(send(*pair) for pair in zip(bodies, job.offsets_s, strict=True)))
