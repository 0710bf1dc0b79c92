"""Failures of host memory and disk below the device: outputs are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.client import Client
from quire.cluster import Cluster
from tests.chaos.blocked_processes import block_on_open, wait_until_blocked
from tests.chaos.conftest import FRONTEND, leaves_nothing_behind
from tests.chaos.test_workers import pid
from tests.e2e.conftest import running_cluster
from tests.e2e.kv.test_disk import few, kill_worker
from tests.e2e.kv.test_host_memory import questions, say
from tests.waiting import until, until_nothing_moves, worker_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 120
SMALL = {"heartbeat_interval_ms": 500}
# Which files are opened for a move, as `block_on_open` reads it: a new one beside the block's own, or that.
MOVES = {
    "to disk": "path.endswith('.new') and flags & os.O_EXCL",
    "from disk": "path.endswith('.kv') and not flags & os.O_WRONLY",
}


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Outputs with a device that holds everything and no lower tiers."""
    with running_cluster(worker={"num_blocks": 2000}) as cluster, Client(cluster.grpc_address) as client:
        return say(client, questions())[0]


@pytest.fixture
def region() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("worker-0/*/*/*.kv"))


def stored(client: Client, count: int, said: Future[Any]) -> None:
    """Waits until `count` more blocks are on disk, or all output has arrived."""
    before = worker_of(client).disk.stored
    until(lambda: worker_of(client).disk.stored >= before + count or said.done())


def test_a_worker_that_is_killed_while_it_stores(expected: list[str], tmp_path: Path, region: str) -> None:
    """Killed three times with a host memory region and a disk; it finds the completely written blocks again."""
    settings = few(tmp_path) | {"kv_offloading_region": region}
    with (
        running_cluster(worker=settings, scheduler=SMALL, frontend=FRONTEND) as cluster,
        Client(cluster.grpc_address) as client,
    ):
        for _ in range(3):
            with ThreadPoolExecutor(1) as asking:
                said: Future[Any] = asking.submit(say, client, questions())
                stored(client, 4, said)
                kill_worker(cluster)
                assert said.result(PATIENCE_S)[0] == expected
            for path in files(tmp_path)[::2]:  # the worker finds out, and stores them again
                path.unlink()
        again, num_prompt_tokens, cached = say(client, questions())
        assert again == expected
        assert cached > num_prompt_tokens / 4
        leaves_nothing_behind(cluster)


def test_the_scheduler_is_killed_while_blocks_are_moved(expected: list[str], tmp_path: Path) -> None:
    """Killed three times, during transfers to host memory, to disk and back; the next scheduler does not
    know of them."""
    with (
        running_cluster(worker=few(tmp_path), scheduler=SMALL, frontend=FRONTEND) as cluster,
        Client(cluster.grpc_address) as client,
    ):
        for _ in range(3):
            with ThreadPoolExecutor(1) as asking:
                said: Future[Any] = asking.submit(say, client, questions())
                stored(client, 4, said)
                os.kill(pid(cluster, "scheduler-0"), signal.SIGKILL)
                assert said.result(PATIENCE_S)[0] == expected
            worker_of(client)  # the scheduler is back, and the worker with it
        assert cluster.process("scheduler-0").restarts == 3
        again, _, cached = say(client, questions())
        assert again == expected
        assert cached > 0
        leaves_nothing_behind(cluster)


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0"])
@pytest.mark.parametrize("move", MOVES)
async def test_killed_in_the_middle_of_a_move(
    expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: str, victim: str
) -> None:
    """A worker thread blocks before opening a block's file until a process has been killed."""
    kept, imported = tmp_path / "kv", tmp_path / "imported"
    kept.mkdir()
    imported.mkdir()
    pipe = block_on_open(imported, MOVES[move])
    monkeypatch.setenv("PYTHONPATH", str(imported), prepend=os.pathsep)
    with (
        running_cluster(worker=few(kept), scheduler=SMALL, frontend=FRONTEND) as cluster,
        Client(cluster.grpc_address) as client,
    ):
        if move == "from disk":
            await asyncio.to_thread(say, client, questions())
            await asyncio.to_thread(until_nothing_moves, client)
        os.mkfifo(pipe)
        said = asyncio.ensure_future(asyncio.to_thread(say, client, questions()))
        writer = await wait_until_blocked(pipe, pid(cluster, "worker-0"))
        os.unlink(pipe)  # for the one that comes
        os.kill(pid(cluster, victim), signal.SIGKILL)
        os.close(writer)
        assert (await said)[0] == expected
        assert (await asyncio.to_thread(say, client, questions()))[0] == expected
        assert cluster.process(victim).restarts == 1
        leaves_nothing_behind(cluster)


def test_torn_swapped_and_missing_files(expected: list[str], tmp_path: Path) -> None:
    with running_cluster(worker=few(tmp_path), frontend=FRONTEND) as cluster, Client(cluster.grpc_address) as client:
        say(client, questions())
        until_nothing_moves(client)
        held = files(tmp_path)
        assert len(held) > 60
        for path, other in zip(held[::4], held[1::4], strict=False):
            swapped = other.read_bytes()
            other.write_bytes(path.read_bytes())
            path.write_bytes(swapped)
        for path in held[2::8]:
            os.truncate(path, path.stat().st_size // 2)
        for path in held[6::8]:
            path.unlink()
        assert say(client, questions())[0] == expected
        assert worker_of(client).disk.lost > 10
        for path in files(tmp_path)[::2]:  # a bit of each, and another life: names and sizes are right
            content = bytearray(path.read_bytes())
            content[-100] ^= 4
            path.write_bytes(content)
        kill_worker(cluster)
        assert say(client, questions())[0] == expected
        assert worker_of(client).disk.lost > 20
        leaves_nothing_behind(cluster)


def test_a_full_disk(expected: list[str], tmp_path: Path) -> None:
    """Files of the worker cannot grow beyond a header."""
    with running_cluster(worker=few(tmp_path)) as cluster, Client(cluster.grpc_address) as client:
        resource.prlimit(pid(cluster, "worker-0"), resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        assert say(client, questions())[0] == expected
        dropped = until_nothing_moves(client).disk
        assert dropped.dropped > 50
        assert dropped.held == 0
        assert not [path for path in tmp_path.rglob("*") if path.suffix in (".kv", ".new")]
        resource.prlimit(
            pid(cluster, "worker-0"), resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
        assert say(client, questions())[0] == expected
        assert until_nothing_moves(client).disk.held > 50, "it takes blocks again"
        leaves_nothing_behind(cluster)


def test_a_disk_that_hangs(expected: list[str], tmp_path: Path) -> None:
    """Opening one of these files blocks forever."""
    with running_cluster(worker=few(tmp_path)) as cluster, Client(cluster.grpc_address) as client:
        say(client, questions())
        until_nothing_moves(client)
        for path in files(tmp_path)[::3]:
            path.unlink()
            os.mkfifo(path)
        assert say(client, questions())[0] == expected
        assert worker_of(client).disk.lost > 0
        assert say(client, questions())[0] == expected
        leaves_nothing_behind(cluster)


def test_other_weights_in_the_same_folder(tmp_path: Path, region: str) -> None:
    """Random weights of the same shapes: stored blocks of other weights are not used."""
    settings = few(tmp_path) | {"kv_offloading_region": region}
    dummy = settings | {"load_format": "dummy", "seed": 5}
    alone = {"num_blocks": 2000, "load_format": "dummy", "seed": 5}

    def texts(worker: dict[str, object]) -> tuple[list[str], int, Cluster]:
        with running_cluster(worker=worker) as cluster, Client(cluster.grpc_address) as client:
            said, _, cached = say(client, questions())
            return said, cached, cluster

    texts(settings)
    said, cached, _ = texts(dummy)
    undisturbed, cached_alone, _ = texts(alone)
    assert said == undisturbed
    assert cached <= cached_alone + 16 * len(questions())
