"""Runs a service: one event loop; the first SIGTERM or Ctrl-C drains, the second exits at once. If the service
already drains for another reason, the first signal does not count as a second."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

import uvloop

from quire.shared.errors import Internal, QuireError
from quire.shared.logs import as_json, flush, is_json, logger, print_line
from quire.shared.process.garbage import Collector
from quire.shared.process.watchdog import Watchdog

log = logger("lifecycle")

PARENT_PIPE_VARIABLE = "QUIRE_PARENT_PIPE"  # if set, stdin is a pipe that the launcher keeps open while it runs
EXIT_FAILED = 1
EXIT_STARTUP_ERROR = 2
EXIT_FORCED = 130
CANCEL_AGAIN_S = 3.0
_own_process: list[bool] = []  # not empty: run() owns this process
_watchdogs: list[Watchdog] = []  # the watchdog of run()


class Shutdown:
    """Set by a signal or by AdminService.Drain; the service awaits it and then drains."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._signalled = False

    def install(self) -> None:
        """Handles SIGTERM and SIGINT on the running loop; if a launcher has set PARENT_PIPE_VARIABLE, also drains
        when stdin ends."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        if os.environ.get(PARENT_PIPE_VARIABLE):
            loop.add_reader(sys.stdin.fileno(), self._on_orphaned)

    def _on_signal(self, name: str) -> None:
        """Requests the shutdown at the first signal; exits the process at once with EXIT_FORCED at the second."""
        if self._signalled:
            log.warning("second signal received, exiting immediately", signal=name)
            flush()
            os._exit(EXIT_FORCED)
        self._signalled = True
        if self.requested:  # by an operator, or because the launcher died
            log.info("already draining; another signal exits immediately", signal=name)
            return
        log.info("draining", signal=name)
        self._requested.set()

    def _on_orphaned(self) -> None:
        """Drains because the parent process died (its end of the pipe closed)."""
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        log.warning("the parent process has exited, draining")
        self._requested.set()

    def request(self) -> None:
        self._requested.set()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    async def wait(self) -> None:
        await self._requested.wait()


def run(service: Callable[[Shutdown], Coroutine[Any, Any, None]]) -> int:
    """Runs `service` to its end on uvloop and returns the exit status: 2 with one line on stderr if it cannot work,
    1 if a part of it ended unexpectedly."""

    async def main() -> None:
        """Runs the service with a handler of signals and a watchdog, which stops when the service ends."""
        _own_process.append(True)
        shutdown = Shutdown()
        shutdown.install()
        watchdog = Watchdog()
        _watchdogs.append(watchdog)
        try:
            await service(shutdown)
        finally:
            watchdog.stop()

    try:
        uvloop.run(main())
    except QuireError as error:
        print_line(f"quire: {error.message}", sys.stderr)
        return EXIT_FAILED if isinstance(error, Internal) else EXIT_STARTUP_ERROR
    return 0


def exit_process(status: int) -> NoReturn:
    """Exits the process after running the registered exit handlers, without Python's finalization: daemon threads
    may be inside a library, whose teardown would crash them and replace `status` by a signal."""
    atexit._run_exitfuncs()
    flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def freeze_startup_objects(collector: Collector | None = None) -> None:
    """Excludes the objects that exist now from garbage collection, if this process is a service. Traversing them
    would block everything each time: a frontend for 35 ms, a worker with torch for 120 ms. `collector`: runs later
    collections; None: a default one."""
    if _own_process:
        (collector or Collector()).start(asyncio.get_running_loop())


def announce_ready(role: str, name: str, **addresses: str) -> None:
    """Prints on stdout that the service is ready, with its addresses, for the process that started it. From now on
    the watchdog expects the event loop to run; during start-up it may block on imports."""
    if is_json():
        print_line(as_json(name, "ready", role=role, id=name, **addresses), sys.stdout)
    else:
        where = "".join(f" {kind}={address}" for kind, address in addresses.items())
        print_line(f"quire-{role} ready id={name}{where}", sys.stdout)
    for watchdog in _watchdogs:
        watchdog.start()


async def run_until_first(*contenders: Awaitable[Any], cancel_again_s: float = CANCEL_AGAIN_S) -> None:
    """Runs all awaitables until one ends, cancels the rest, and raises what it raised; Internal if it was cancelled.
    `cancel_again_s`: seconds after which what did not end is cancelled again."""
    tasks = [asyncio.ensure_future(c) for c in contenders]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        _raise_failure_of([task for task in tasks if task.done()])
    finally:
        pending = set(tasks)
        while pending:  # a library may lose a cancellation that arrives together with a result
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=cancel_again_s)
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_failure_of(ended: list[asyncio.Future[Any]]) -> None:
    """Raises the error of an ended task, in preference to a cancellation that came with it and was not requested
    here."""
    for task in ended:
        if not task.cancelled():
            task.result()
    if any(task.cancelled() for task in ended):
        raise Internal("a task was cancelled unexpectedly")
