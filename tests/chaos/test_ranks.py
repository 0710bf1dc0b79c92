"""Ranks of a worker that die or hang: its epoch ends, streams continue elsewhere or after a restart; no process
remains."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.client import Client
from quire.cluster import Cluster
from tests.chaos.conftest import FRONTEND, SCHEDULER, WORKER, Said, listen
from tests.chaos.paused_processes import keep_fault, pause_processes
from tests.chaos.streams import everything, greedy
from tests.chaos.test_workers import assert_survives, pid
from tests.e2e.conftest import running_cluster
from tests.waiting import eventually, services, until

pytestmark = pytest.mark.timeout(300)
RANKS = {**WORKER, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Said]:
    """Outputs of two ranks: sums over ranks round differently than those of one rank."""

    with running_cluster(worker=RANKS, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        return asyncio.run(listen(cluster, greedy))


@pytest.fixture(scope="module")
def heard() -> dict[str, Said]:
    """Outputs by kind of ranks, recorded on first use."""
    return {}


@pytest.fixture
def alone() -> Iterator[Cluster]:
    with running_cluster(workers=1, worker=RANKS, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        yield cluster


@pytest.fixture
def two() -> Iterator[Cluster]:
    with running_cluster(workers=2, worker=RANKS, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        yield cluster


def children(worker: int) -> list[int]:
    """Process ids of a worker's ranks: those with its command line, via the fork server."""
    commands, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            commands[int(folder.name)] = (folder / "cmdline").read_bytes()
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return [
        number
        for number, parent in parents.items()
        if parents.get(parent) == worker and commands[number] == commands.get(worker)
    ]


def rank_of(cluster: Cluster, name: str) -> int:
    (rank,) = children(pid(cluster, name))
    return rank


def is_there(number: int) -> bool:
    return Path(f"/proc/{number}").exists()


async def gone(number: int) -> None:
    await eventually(lambda: not is_there(number))


def num_restarts(cluster: Cluster) -> dict[str, int]:
    """Restarts of each worker's process, once that of worker-0 has restarted."""
    until(lambda: cluster.process("worker-0").restarts)
    return {one.spec.id: one.restarts for one in cluster.processes if one.spec.role == "worker"}


@pytest.mark.slow
async def test_a_rank_of_one_of_two_workers_is_killed(two: Cluster, undisturbed: dict[str, Said]) -> None:
    await assert_survives(two, undisturbed, lambda: os.kill(rank_of(two, "worker-0"), signal.SIGKILL))
    assert num_restarts(two) == {"worker-0": 1, "worker-1": 0}


@pytest.mark.slow
@pytest.mark.sweep
async def test_a_rank_is_killed_among_samples_and_their_log_probabilities(two: Cluster) -> None:
    undisturbed = await listen(two, everything)
    await assert_survives(two, undisturbed, lambda: os.kill(rank_of(two, "worker-0"), signal.SIGKILL), "everything")
    assert num_restarts(two) == {"worker-0": 1, "worker-1": 0}


@pytest.mark.slow
async def test_rank_with_the_stream_is_killed_and_no_process_remains(
    alone: Cluster, undisturbed: dict[str, Said]
) -> None:
    async def kill() -> None:
        rank = rank_of(alone, "worker-0")
        os.kill(pid(alone, "worker-0"), signal.SIGKILL)
        await gone(rank)

    await assert_survives(alone, undisturbed, kill)
    assert num_restarts(alone) == {"worker-0": 1}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_stage_of_one_of_two_workers_is_killed_or_hangs(fault: signal.Signals) -> None:
    """Steps are in flight on this stage and on the first one at that moment."""
    staged = {**WORKER, "pipeline_parallel_size": 2}
    with running_cluster(workers=2, worker=staged, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        undisturbed = await listen(cluster, greedy)

        async def strike() -> None:
            rank = rank_of(cluster, "worker-0")
            os.kill(rank, fault)
            await gone(rank)

        await assert_survives(cluster, undisturbed, strike)
        assert num_restarts(cluster) == {"worker-0": 1, "worker-1": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "fault"), [("rank", signal.SIGKILL), ("rank", signal.SIGSTOP), ("0", signal.SIGKILL)]
)
async def test_a_rank_that_has_a_part_of_the_prompts_is_killed_or_hangs(
    victim: str, fault: signal.Signals, heard: dict[str, Said]
) -> None:
    """Either of the two ranks that divide prompts. Prompts of all streams arrive at once, and again when they are
    resubmitted."""
    sharing = {**WORKER, "context_parallel_size": 2}
    with running_cluster(workers=2, worker=sharing, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        undisturbed = heard or await listen(cluster, greedy)
        heard.update(undisturbed)

        async def strike() -> None:
            rank = rank_of(cluster, "worker-0")
            os.kill(pid(cluster, "worker-0") if victim == "0" else rank, fault)
            await gone(rank)

        await assert_survives(cluster, undisturbed, strike)
        assert num_restarts(cluster) == {"worker-0": 1, "worker-1": 0}


@pytest.mark.slow
async def test_a_rank_hangs(two: Cluster, undisturbed: dict[str, Said]) -> None:
    """The worker kills the rank and restarts, as no other service can end it."""

    async def hang() -> None:
        rank = rank_of(two, "worker-0")
        os.kill(rank, signal.SIGSTOP)
        await gone(rank)

    await assert_survives(two, undisturbed, hang)
    assert num_restarts(two) == {"worker-0": 1, "worker-1": 0}


@pytest.mark.slow
async def test_a_rank_of_the_only_worker_is_killed_again_and_again_while_it_starts(
    alone: Cluster, undisturbed: dict[str, Said]
) -> None:
    with Client(alone.grpc_address) as client:
        epoch = services(client, "worker-0")["worker-0"].epoch

    async def kill_early() -> None:
        before = rank_of(alone, "worker-0")
        for pause_s in (0.0, 1.0):  # imports torch; loads, or meets the other one
            worker = alone.process("worker-0")
            os.kill(before, signal.SIGKILL)
            await eventually(lambda worker=worker: worker.running)  # type: ignore[misc]
            (before,) = await eventually(
                lambda: children(pid(alone, "worker-0")),
                lambda found, before=before: found not in ([], [before]),  # type: ignore[misc]
            )
            await keep_fault(pause_s)
        os.kill(before, signal.SIGKILL)

    await assert_survives(alone, undisturbed, kill_early)
    with Client(alone.grpc_address) as client:
        assert services(client, "worker-0")["worker-0"].epoch > epoch


@pytest.mark.slow
async def test_stopped_group_of_ranks_continues(alone: Cluster, undisturbed: dict[str, Said]) -> None:
    """No rank is taken for dead after a pause of all ranks, as when a machine is suspended."""
    pids = [pid(alone, "worker-0"), rank_of(alone, "worker-0")]

    async def stop() -> None:
        await pause_processes(4, *pids)

    await assert_survives(alone, undisturbed, stop)
    assert [pid(alone, "worker-0"), rank_of(alone, "worker-0")] == pids
