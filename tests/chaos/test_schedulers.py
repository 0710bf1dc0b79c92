"""Schedulers that die, hang and leave, and frontends that die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from quire.client import Client
from quire.cluster import Cluster
from quire.params import SamplingParams
from tests.chaos.conftest import (
    FRONTEND,
    LONGER_THAN_A_STEP_S,
    SCHEDULER,
    WORKER,
    Said,
    leaves_nothing_behind,
    services,
)
from tests.chaos.extra_frontend import extra_frontend
from tests.chaos.paused_processes import keep_fault, pause_processes
from tests.chaos.streams import KINDS, Crowd, differences, greedy
from tests.chaos.test_workers import assert_survives, pid
from tests.e2e.conftest import running_cluster
from tests.waiting import eventually, until

pytestmark = pytest.mark.timeout(300)

DOCUMENT = "The lighthouse keeper counts the boats that come home. " * 40


@pytest.fixture
def two_schedulers() -> Iterator[Cluster]:
    with running_cluster(workers=2, schedulers=2, worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        yield cluster


@pytest.mark.parametrize("kind", KINDS)
async def test_the_scheduler_is_killed(two_workers: Cluster, undisturbed: dict[str, Said], kind: str) -> None:
    await assert_survives(
        two_workers, undisturbed, lambda: os.kill(pid(two_workers, "scheduler-0"), signal.SIGKILL), kind
    )


@pytest.mark.slow
async def test_the_scheduler_is_killed_ten_times_in_a_row(one_worker: Cluster, undisturbed: dict[str, Said]) -> None:
    """Killed each time as soon as it serves; it is back before any request times out."""

    async def kill_again_and_again() -> None:
        scheduler = one_worker.process("scheduler-0")
        for killed in range(10):
            await eventually(lambda killed=killed: scheduler.restarts >= killed and scheduler.ready.is_set())
            os.kill(pid(one_worker, "scheduler-0"), signal.SIGKILL)

    await assert_survives(one_worker, undisturbed, kill_again_and_again)


@pytest.mark.slow
async def test_a_restarted_scheduler_finds_the_cache_warm(one_worker: Cluster) -> None:
    """Workers keep their blocks and report their contents."""
    params = SamplingParams(temperature=0, max_tokens=4)

    def cached_tokens() -> int:
        with Client(one_worker.grpc_address) as client:
            return client.generate(DOCUMENT, params)[0].cached_tokens

    assert await asyncio.to_thread(cached_tokens) == 0
    before = await asyncio.to_thread(cached_tokens)
    os.kill(pid(one_worker, "scheduler-0"), signal.SIGKILL)
    after = await asyncio.to_thread(cached_tokens)
    print(f"cached tokens before {before}, after {after}")
    assert after == before > 300


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGTERM])
async def test_a_second_shard_takes_over(
    two_schedulers: Cluster, undisturbed: dict[str, Said], fault: signal.Signals
) -> None:
    await assert_survives(two_schedulers, undisturbed, lambda: os.kill(pid(two_schedulers, "scheduler-0"), fault))


@pytest.mark.slow
async def test_second_shard_takes_over_from_a_hanging_one_that_recovers(
    two_schedulers: Cluster, undisturbed: dict[str, Said]
) -> None:
    async def hang() -> None:
        await pause_processes(4, pid(two_schedulers, "scheduler-0"))

    await assert_survives(two_schedulers, undisturbed, hang)


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("worker-0", signal.SIGKILL),
        ("worker-0", signal.SIGSTOP),
        ("worker-0", signal.SIGTERM),
        ("scheduler-0", signal.SIGKILL),
        ("scheduler-0", signal.SIGTERM),
    ],
)
@pytest.mark.slow
async def test_redis_is_away_while_another_part_goes(
    two_schedulers: Cluster, undisturbed: dict[str, Said], part: str, fault: signal.Signals
) -> None:
    async def go() -> None:
        if fault == signal.SIGSTOP:
            await pause_processes(LONGER_THAN_A_STEP_S, pid(two_schedulers, part))
        else:
            os.kill(pid(two_schedulers, part), fault)

    os.kill(pid(two_schedulers, "redis-0"), signal.SIGSTOP)
    try:
        await keep_fault(1.5)
        await assert_survives(two_schedulers, undisturbed, go)
    finally:
        os.kill(pid(two_schedulers, "redis-0"), signal.SIGCONT)


@pytest.mark.slow
async def test_streams_do_not_depend_on_redis(two_schedulers: Cluster, undisturbed: dict[str, Said]) -> None:
    crowd = await assert_survives(
        two_schedulers, undisturbed, lambda: os.kill(pid(two_schedulers, "redis-0"), signal.SIGKILL)
    )
    assert crowd.longest_gap_s < 5, "longer than this machine may stand still: somebody waited for it"


@pytest.mark.slow
async def test_a_killed_frontend_frees_its_blocks_and_disturbs_no_other(
    one_worker: Cluster, undisturbed: dict[str, Said]
) -> None:
    long = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)  # it has not ended when its frontend does
    async with extra_frontend(one_worker) as other:
        doomed = Crowd(other.grpc, lambda _: long, count=16)
        crowd = Crowd(one_worker.grpc_address, greedy)
        await asyncio.gather(doomed.all_streaming(), crowd.all_streaming())
        assert doomed.errors == []
        os.kill(other.process, signal.SIGKILL)
        await crowd.finished()
        await doomed.finished()
    assert crowd.errors == []
    assert not differences(crowd, undisturbed["greedy"])
    assert len(doomed.errors) == 16, "a client of a dead frontend sees its connection break"
    leaves_nothing_behind(one_worker)
    until(lambda: "other" not in services(one_worker.grpc_address))
