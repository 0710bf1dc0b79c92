"""Workers that die, hang, leave and multiply: every stream returns the undisturbed output, each token
once, in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.client import Client
from quire.cluster import Cluster
from quire.shared.errors import DeadlineExceeded
from tests import waiting
from tests.chaos.conftest import LONGER_THAN_A_STEP_S, Said, leaves_nothing_behind, page
from tests.chaos.paused_processes import keep_fault, pause_processes
from tests.chaos.streams import KINDS, Crowd, constrained, differences, everything, greedy
from tests.waiting import eventually, until

pytestmark = pytest.mark.timeout(300)


def pid(cluster: Cluster, name: str) -> int:
    found = cluster.process(name).pid
    assert found is not None
    return found


def num_connections(number: int) -> int:
    """Established TCP connections of a process; a worker's first one is to its scheduler."""
    table = [
        line for kind in ("tcp", "tcp6") for line in Path(f"/proc/{number}/net/{kind}").read_text().splitlines()[1:]
    ]
    established = {fields[9] for fields in map(str.split, table) if fields[3] == "01"}
    found = 0
    for descriptor in Path(f"/proc/{number}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(descriptor).removeprefix("socket:[").rstrip("]") in established
    return found


async def assert_survives(
    cluster: Cluster,
    undisturbed: dict[str, Said],
    fault: Callable[[], object],
    kind: str = "greedy",
    page: Callable[[str], str] = page,
) -> Crowd:
    """Disturbs a streaming crowd and checks that no stream saw more than a pause. `page`: reads a metrics page."""
    kinds = {"greedy": greedy, "everything": everything, "constrained": constrained}
    crowd = Crowd(cluster.grpc_address, kinds[kind])
    await crowd.all_streaming()
    result = fault()
    if asyncio.iscoroutine(result):
        await result
    await crowd.finished()
    assert crowd.errors == []
    assert not differences(crowd, undisturbed[kind])
    leaves_nothing_behind(cluster, page)
    print(f"longest pause {crowd.longest_gap_s:.2f} s")
    return crowd


@pytest.mark.parametrize("kind", KINDS)
async def test_one_of_two_workers_is_killed(two_workers: Cluster, undisturbed: dict[str, Said], kind: str) -> None:
    await assert_survives(two_workers, undisturbed, lambda: os.kill(pid(two_workers, "worker-0"), signal.SIGKILL), kind)


@pytest.mark.slow
async def test_forms_are_filled_across_a_dead_worker(one_worker: Cluster, undisturbed: dict[str, Said]) -> None:
    """The grammar is compiled again and earlier tokens are replayed: the output is one valid JSON text."""
    crowd = await assert_survives(
        one_worker, undisturbed, lambda: os.kill(pid(one_worker, "worker-0"), signal.SIGKILL), "constrained"
    )
    for index, stream in enumerate(crowd.streams):
        for text in stream.text.values():
            records = json.loads(text)
            assert [set(record) for record in records] == [{f"words{index}", "count"}] * 4


@pytest.mark.slow
async def test_the_only_worker_is_killed(one_worker: Cluster, undisturbed: dict[str, Said]) -> None:
    await assert_survives(one_worker, undisturbed, lambda: os.kill(pid(one_worker, "worker-0"), signal.SIGKILL))


@pytest.mark.slow
async def test_a_worker_is_killed_while_it_attaches(one_worker: Cluster, undisturbed: dict[str, Said]) -> None:
    """Killed before and after its scheduler may have heard of it."""

    async def kill_early() -> None:
        for pause_s in (0.0, 0.1):  # a third time would look like a sequence that kills workers
            worker = one_worker.process("worker-0")
            restarts = worker.restarts
            os.kill(pid(one_worker, "worker-0"), signal.SIGKILL)
            await eventually(lambda worker=worker, restarts=restarts: worker.restarts != restarts and worker.running)
            await eventually(lambda: num_connections(pid(one_worker, "worker-0")) != 0)
            await keep_fault(pause_s)

    await assert_survives(one_worker, undisturbed, kill_early)


@pytest.mark.slow
async def test_a_worker_and_the_scheduler_are_stopped_at_once(
    two_workers: Cluster, undisturbed: dict[str, Said]
) -> None:
    async def stop_both() -> None:
        pids = [pid(two_workers, name) for name in ("worker-0", "scheduler-0")]
        await pause_processes(4, *pids)

    await assert_survives(two_workers, undisturbed, stop_both)


@pytest.mark.slow
async def test_hanging_worker_recovers_as_a_zombie(two_workers: Cluster, undisturbed: dict[str, Said]) -> None:
    with Client(two_workers.grpc_address) as client:
        epoch = waiting.services(client, "worker-0")["worker-0"].epoch

    async def hang() -> None:
        await pause_processes(LONGER_THAN_A_STEP_S, pid(two_workers, "worker-0"))

    await assert_survives(two_workers, undisturbed, hang)
    with Client(two_workers.grpc_address) as client:
        assert waiting.services(client, "worker-0")["worker-0"].epoch > epoch


@pytest.mark.slow
async def test_one_of_two_workers_leaves(two_workers: Cluster, undisturbed: dict[str, Said]) -> None:
    await assert_survives(two_workers, undisturbed, lambda: os.kill(pid(two_workers, "worker-0"), signal.SIGTERM))


@pytest.mark.slow
async def test_the_only_worker_leaves(one_worker: Cluster, undisturbed: dict[str, Said]) -> None:
    await assert_survives(one_worker, undisturbed, lambda: os.kill(pid(one_worker, "worker-0"), signal.SIGTERM))


@pytest.mark.slow
async def test_workers_join_and_leave_under_load(one_worker: Cluster, undisturbed: dict[str, Said]) -> None:
    async def scale() -> None:
        await asyncio.to_thread(one_worker.scale_workers, 4)
        with Client(one_worker.grpc_address) as client:
            await asyncio.to_thread(waiting.services, client, *(f"worker-{i}" for i in range(4)))
        await asyncio.to_thread(one_worker.scale_workers, 1)

    await assert_survives(one_worker, undisturbed, scale)


@pytest.mark.slow
async def test_requests_wait_while_there_is_no_worker(one_worker: Cluster, undisturbed: dict[str, Said]) -> None:
    await asyncio.to_thread(one_worker.scale_workers, 0)
    crowd = Crowd(one_worker.grpc_address, greedy)
    with Client(one_worker.grpc_address) as client:
        told = [("quire-tiny", False)]
        await asyncio.to_thread(until, lambda: [(model.name, model.ready) for model in client.models()] == told)
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(client.generate, "Once", None, None, 1.0)
    assert not crowd.errors
    await asyncio.to_thread(one_worker.scale_workers, 1)
    await crowd.finished()
    assert crowd.errors == []
    assert not differences(crowd, undisturbed["greedy"])
