"""Waiting for states that are reached soon."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from quire.client import Client
from quire.shared.pb.admin.v1 import admin_pb2

PATIENCE_S = 60.0
POLL_S = 0.005
NUM_QUICK_POLLS = 20  # a turn of the event loop apart: most states are reached within a few

Found = TypeVar("Found")


async def eventually(
    ask: Callable[[], Found | Awaitable[Found]],
    is_right: Callable[[Found], object] = bool,
    patience_s: float = PATIENCE_S,
) -> Found:
    """Returns the first answer of `ask` that is right; fails with the last one if none is within `patience_s`."""
    found: object = None
    try:
        async with asyncio.timeout(patience_s) as patience:
            for num_polls in itertools.count():
                answer = ask()
                found = await answer if inspect.isawaitable(answer) else answer
                if is_right(found):  # type: ignore[arg-type]
                    return found  # type: ignore[return-value]
                await asyncio.sleep(0 if num_polls < NUM_QUICK_POLLS else POLL_S)
    except TimeoutError as error:
        if not patience.expired():
            raise
        raise AssertionError(f"not within {patience_s:g} s; the last answer: {found!r}") from error
    raise AssertionError("unreachable")


async def stays(holds: Callable[[], object], seconds: float) -> None:
    """Fails if `holds` becomes false within the time."""
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + seconds
    while True:
        is_over = loop.time() >= ends_s
        assert holds()
        if is_over:
            return
        await asyncio.sleep(POLL_S)


async def loop_turns(count: int = 1) -> None:
    """Lets the event loop run what is ready, `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def forever() -> None:
    """Waits until the task is cancelled."""
    await asyncio.Event().wait()


def until(ask: Callable[[], Found], patience_s: float = PATIENCE_S, what: str = "it does not hold") -> Found:
    """Returns the first answer of `ask` that is true; `what` is said where none is within `patience_s`."""
    ends_s = time.monotonic() + patience_s
    while not (found := ask()):
        assert time.monotonic() < ends_s, f"not within {patience_s:g} s: {what}"
        time.sleep(0.02)
    return found


async def accepted(
    call: Callable[[], Awaitable[Found]], *refusals: type[Exception], patience_s: float = PATIENCE_S
) -> Found:
    """Returns what `call` gives, once it no longer raises one of `refusals`."""

    async def attempt() -> tuple[Found] | None:
        with contextlib.suppress(*refusals):
            return (await call(),)
        return None

    (given,) = await eventually(attempt, patience_s=patience_s)  # type: ignore[misc]
    return given


def has_ended(pid: int) -> bool:
    """Returns whether a process is gone, or a zombie: its parent may be gone, too."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def is_reaped(pid: int) -> bool:
    """Returns whether nothing is left of a process whose parent waits for it: no thread, no open file."""
    return not Path(f"/proc/{pid}").exists()


def services(client: Client, *names: str) -> dict[str, admin_pb2.ServiceStatus]:
    """Returns all services by id, once these are among them: a session that a standstill ended returns soon."""
    found: dict[str, admin_pb2.ServiceStatus] = {}

    def are_there() -> bool:
        found.clear()
        found.update((service.id, service) for service in client.status())
        return found.keys() >= set(names)

    until(are_there)
    return found


def worker_of(client: Client) -> admin_pb2.ServiceStatus:
    """Returns the only worker, or the first."""
    found: list[admin_pb2.ServiceStatus] = []

    def is_there() -> bool:
        found[:] = [service for service in client.status() if service.role == admin_pb2.ROLE_WORKER]
        return bool(found)

    until(is_there)
    return found[0]


def until_idle(client: Client) -> None:
    """Waits until no worker runs or keeps anything: an answer arrives before the last step has returned, and a
    client's disconnect is noticed a moment later."""

    def is_idle() -> bool:
        found = [service for service in client.status() if service.role == admin_pb2.ROLE_WORKER]
        return bool(found) and not any(one.blocks.used or one.running or one.waiting for one in found)

    until(is_idle)


def until_nothing_moves(client: Client) -> admin_pb2.ServiceStatus:
    """Returns the only worker once no block is being moved between its tiers."""
    seen: list[admin_pb2.ServiceStatus] = []

    def has_settled() -> bool:
        client.pause_generation()
        try:
            seen.append(worker_of(client))
        finally:
            client.resume_generation()
        return len(seen) > 1 and _tiers(seen[-1]) == _tiers(seen[-2])

    until(has_settled)
    return seen[-1]


def _tiers(worker: admin_pb2.ServiceStatus) -> tuple[admin_pb2.HostMemory, admin_pb2.DiskBlocks]:
    return worker.host_memory, worker.disk
