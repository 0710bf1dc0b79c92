"""A worker or the scheduler is killed while prompts are handed over from the worker that computes them: outputs do not
change."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.chaos.conftest import FRONTEND, SCHEDULER, WORKER, Said, leaves_nothing_behind
from tests.chaos.streams import Crowd, differences, greedy
from tests.chaos.test_workers import pid
from tests.e2e.conftest import running_cluster
from tests.e2e.kv.test_kv_handover import metric_total
from tests.waiting import eventually

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

HANDOVERS = "quire_scheduler_handovers_total"
APART = SCHEDULER | {"prefill_threshold": 16}
VICTIMS = ["worker-0", "worker-1", "scheduler-0"]  # the prefill worker, the decode worker, the scheduler


@pytest.mark.parametrize("victim", VICTIMS)
async def test_streams_survive(victim: str, undisturbed: dict[str, Said]) -> None:
    with running_cluster(apart=(1, 1), worker=WORKER, scheduler=APART, frontend=FRONTEND) as cluster:
        crowd = Crowd(cluster.grpc_address, greedy)
        await eventually(lambda: asyncio.to_thread(metric_total, cluster, HANDOVERS))
        os.kill(pid(cluster, victim), signal.SIGKILL)
        await crowd.finished()
        assert not crowd.errors
        assert not differences(crowd, undisturbed["greedy"])
        leaves_nothing_behind(cluster)


@pytest.mark.parametrize("victim", VICTIMS)
async def test_streams_survive_while_all_of_it_is_on_its_way(victim: str, undisturbed: dict[str, Said]) -> None:
    """The decoding worker is stopped, so that no block arrives but it is not given up: all output comes from the
    prefilling worker, and all blocks are still to be transferred at the kill."""
    patient = APART | {"heartbeat_interval_ms": 20_000, "step_deadline_s": 120.0}
    with running_cluster(apart=(1, 1), worker=WORKER, scheduler=patient, frontend=FRONTEND) as cluster:
        decoder = pid(cluster, "worker-1")
        os.kill(decoder, signal.SIGSTOP)
        try:
            crowd = Crowd(cluster.grpc_address, greedy)
            await eventually(lambda: any(stream.arrivals for stream in crowd.streams))
            assert not await asyncio.to_thread(metric_total, cluster, HANDOVERS)
            os.kill(pid(cluster, victim), signal.SIGKILL)
        finally:
            if victim != "worker-1":
                os.kill(decoder, signal.SIGCONT)
        await crowd.finished()
        assert not crowd.errors
        assert not differences(crowd, undisturbed["greedy"])
        leaves_nothing_behind(cluster)
