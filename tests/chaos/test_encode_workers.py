"""Encode workers die, stop and leave while pictures are fetched, encoded and transferred: texts do not change, and no
rows or jobs stay behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from quire import Client, bundled
from quire.cluster import Cluster
from tests.chaos.conftest import FRONTEND, SCHEDULER, WORKER
from tests.chaos.paused_processes import keep_fault, pause_processes
from tests.chaos.test_media import NUM_STREAMS, StreamedTexts, ask, disturbed, nothing_kept
from tests.chaos.test_workers import pid
from tests.e2e.conftest import running_cluster
from tests.waiting import eventually

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

LANGUAGE, ENCODER = "worker-0", "worker-1"
JOBS = "quire_scheduler_encode_jobs"
# A stopped language worker must not be considered lost while its encode worker is disturbed.
PATIENT = SCHEDULER | {"heartbeat_interval_ms": 2000}


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """Texts of all streams in a cluster without encode workers."""
    told = StreamedTexts()
    with running_cluster(worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        asyncio.run(ask(cluster, told))
    assert not told.errors
    assert all(told.texts)
    return told.texts


def number(cluster: Cluster, series: str) -> float:
    """Returns a number of the scheduler's metrics page; 0 if it is not there."""
    (scheduler,) = [process for process in cluster.processes if process.spec.id == "scheduler-0"]
    for line in httpx.get(f"http://{scheduler.addresses['metrics']}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name == series:
            return float(value)
    return 0.0


def pending(cluster: Cluster, stage: str) -> float:
    return number(cluster, f'{JOBS}_pending{{stage="{stage}"}}')


def num_done(cluster: Cluster) -> float:
    return number(cluster, f'{JOBS}_total{{outcome="done"}}')


def assert_texts(cluster: Cluster, told: StreamedTexts, expected: list[str]) -> None:
    """Checks the texts, and that no job and no rows are left."""
    assert not told.errors
    assert told.texts == expected
    assert (pending(cluster, "encoding"), pending(cluster, "fetching")) == (0, 0)
    nothing_kept(cluster)


@asynccontextmanager
async def asked(cluster: Cluster) -> AsyncIterator[StreamedTexts]:
    """Starts all streams, and waits for their ends."""
    told = StreamedTexts()
    asking = asyncio.ensure_future(ask(cluster, told))
    try:
        yield told
        await asking
    finally:
        asking.cancel()


async def test_texts_are_those_of_a_cluster_without_encode_workers(alone: list[str]) -> None:
    with running_cluster(encode_workers=1, worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        told = StreamedTexts()
        await ask(cluster, told)
        assert num_done(cluster) > 0
        assert_texts(cluster, told, alone)


WHEN: dict[str, Callable[[StreamedTexts], bool]] = {
    "at once": lambda _: True,
    "while they stream": lambda told: sum(map(bool, told.texts)) >= NUM_STREAMS // 2,
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(
    ("victim", "how"),
    [(ENCODER, signal.SIGKILL), (ENCODER, signal.SIGTERM), (LANGUAGE, signal.SIGKILL), ("scheduler-0", signal.SIGKILL)],
)
async def test_texts_do_not_change(victim: str, how: signal.Signals, when: str, alone: list[str]) -> None:
    with running_cluster(encode_workers=1, worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        told = await disturbed(cluster, lambda: os.kill(pid(cluster, victim), how), WHEN[when])
        await asyncio.to_thread(assert_texts, cluster, told, alone)


async def test_an_encode_worker_is_killed_while_it_encodes(alone: list[str]) -> None:
    with running_cluster(encode_workers=1, worker=WORKER, scheduler=PATIENT, frontend=FRONTEND) as cluster:
        os.kill(pid(cluster, ENCODER), signal.SIGSTOP)
        async with asked(cluster) as told:
            await eventually(lambda: pending(cluster, "encoding") > 0)
            os.kill(pid(cluster, ENCODER), signal.SIGKILL)
        assert number(cluster, f'{JOBS}_total{{outcome="worker_lost"}}') > 0
        await asyncio.to_thread(assert_texts, cluster, told, alone)


async def test_an_encode_worker_is_killed_while_it_fetches_pixels(alone: list[str]) -> None:
    with running_cluster(encode_workers=1, worker=WORKER, scheduler=PATIENT, frontend=FRONTEND) as cluster:
        os.kill(pid(cluster, ENCODER), signal.SIGSTOP)
        async with asked(cluster) as told:
            await eventually(lambda: pending(cluster, "encoding") > 0)
            frontend = pid(cluster, "frontend-0")
            os.kill(frontend, signal.SIGSTOP)  # the pixels do not come
            os.kill(pid(cluster, ENCODER), signal.SIGCONT)
            await keep_fault(0.2)
            os.kill(pid(cluster, ENCODER), signal.SIGKILL)
            os.kill(frontend, signal.SIGCONT)
        assert number(cluster, f'{JOBS}_total{{outcome="worker_lost"}}') > 0
        await asyncio.to_thread(assert_texts, cluster, told, alone)


async def test_an_encode_worker_is_killed_while_its_rows_are_fetched(alone: list[str]) -> None:
    with running_cluster(encode_workers=1, worker=WORKER, scheduler=PATIENT, frontend=FRONTEND) as cluster:
        language = pid(cluster, LANGUAGE)
        os.kill(language, signal.SIGSTOP)
        async with asked(cluster) as told:
            await eventually(lambda: pending(cluster, "fetching") > 0)
            os.kill(pid(cluster, ENCODER), signal.SIGKILL)
            await eventually(lambda: not number(cluster, "quire_scheduler_encode_workers"))
            os.kill(language, signal.SIGCONT)
        assert number(cluster, f'{JOBS}_total{{outcome="fetch_failed"}}') > 0
        await asyncio.to_thread(assert_texts, cluster, told, alone)


async def test_an_encode_worker_that_stops_costs_a_pause(alone: list[str]) -> None:
    with running_cluster(encode_workers=1, worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        async with asked(cluster) as told:
            await pause_processes(5 * SCHEDULER["heartbeat_interval_ms"] / 1000 + 2, pid(cluster, ENCODER))
        await eventually(lambda: number(cluster, "quire_scheduler_encode_workers") == 1)
        await asyncio.to_thread(assert_texts, cluster, told, alone)


async def test_two_encode_workers_replace_each_other(alone: list[str]) -> None:
    with running_cluster(encode_workers=2, worker=WORKER, scheduler=PATIENT, frontend=FRONTEND) as cluster:
        os.kill(pid(cluster, ENCODER), signal.SIGSTOP)
        async with asked(cluster) as told:
            await eventually(lambda: pending(cluster, "encoding") > 0)
            os.kill(pid(cluster, ENCODER), signal.SIGKILL)
        assert num_done(cluster) > 0
        await asyncio.to_thread(assert_texts, cluster, told, alone)


async def test_encode_workers_follow_an_update_from_a_folder(alone: list[str], tmp_path: Path) -> None:
    """The weights are the same, so that texts are; the worker of the sequences encodes nothing afterwards."""
    shutil.copytree(bundled.FOLDER, tmp_path / "new")
    worker = WORKER | {"weights_folders": [str(tmp_path)]}
    with running_cluster(encode_workers=1, worker=worker, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        with Client(cluster.grpc_address) as client:
            await asyncio.to_thread(client.update_weights_from_disk, "new")
        told = StreamedTexts()
        while not num_done(cluster):  # until it has loaded the weights, the others encode
            told = StreamedTexts()
            await ask(cluster, told)
        assert_texts(cluster, told, alone)
