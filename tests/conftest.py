"""Common test configuration: order, threads, timeouts and memory."""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import multiprocessing
import os
import sys
from collections.abc import Generator
from pathlib import Path

import httpx
import hypothesis
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default as httpx_transports

from quire.cluster import process
from quire.shared.process import child
from tests import sweeps
from tests.leftovers import Leftovers
from tests.preloaded.process import Zygotes

PATIENCE_S = 60.0  # of a call that names none: the client's own 5 s pass where a busy machine stands still

# Files of up to half a minute. At the end, where the alphabet has them, all other processes would wait for one.
FIRST = ("tests/spec_decode/", "tests/tools/training/")

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of torch that wait for each other spin, and there are other workers
    os.environ.setdefault("OMP_NUM_THREADS", "1")

for name in httpx.Timeout(None).as_dict():
    setattr(DEFAULT_TIMEOUT_CONFIG, name, PATIENCE_S)

# Each client that names no certificates reads all of this machine's.
httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)


def of_this_test(record: logging.LogRecord) -> bool:
    """Filters log records: gRPC's single poller wakes all tests' event loops, and reports to the current one that an
    earlier loop is closed."""
    closed = bool(record.exc_info) and str(record.exc_info[1]) == "Event loop is closed"
    return not (closed and "PollerCompletionQueue._handle_events" in record.getMessage())


logging.getLogger("asyncio").addFilter(of_this_test)

# Its deadlines and its measure of slowness are of a machine with nothing else to do.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Excludes collected objects from garbage collection, because hardly any of them is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries complain of what is there at the end


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores files without slow tests in runs of slow tests only: importing all takes each process ten seconds."""
    if not config.option.markexpr.startswith(sweeps.SLOW_ONLY) or not collection_path.match("test_*.py"):
        return None
    return None if sweeps.may_have_slow_tests(collection_path) else True


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sweeps.mark_the_rest(items)
    sweeps.check_slow_files(items)
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


leftovers = Leftovers()


def pytest_runtest_logfinish() -> None:
    leftovers.let_go()


def pytest_collection_finish() -> None:
    """Starts zygotes with preloaded imports; variables that test files set at import are set by then."""
    zygotes = Zygotes()
    process.launch, child.launch = zygotes.start, zygotes.start_child
    if ranks := sys.modules.get("quire.services.worker.ranks.processes"):
        ranks.START_CONTEXT = multiprocessing.get_context("forkserver")
        multiprocessing.set_forkserver_preload(["quire.services.worker.service"])
