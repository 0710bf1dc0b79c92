"""Ten times the cluster's capacity: refusals are quick and say when to retry, accepted requests are served as usual."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from quire.cluster import Cluster
from quire.params import SamplingParams
from quire.shared.errors import ResourceExhausted
from tests.chaos.conftest import WORKER, leaves_nothing_behind
from tests.e2e.conftest import running_cluster

pytestmark = pytest.mark.timeout(300)

CAPACITY = 4
HINT_MS = 300
ROUNDS = 5
USUAL_S, CROWDED_S = 2, 12  # of each round
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def small() -> Iterator[Cluster]:
    with running_cluster(
        worker=WORKER, frontend={"max_inflight_requests": CAPACITY, "retry_after_ms": HINT_MS}
    ) as cluster:
        yield cluster


@dataclass
class ObservedAnswers:
    """Observations of the clients of one run; seconds."""

    served: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    hints_ms: set[int] = field(default_factory=set)


async def insist(client: AsyncClient, until: float, seen: ObservedAnswers) -> None:
    """Sends requests repeatedly, with a short pause after a refusal."""
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    while time.monotonic() < until:
        begin = time.monotonic()
        try:
            await client.generate("Once upon a time", params)
            seen.served.append(time.monotonic() - begin)
        except ResourceExhausted as refusal:
            seen.refused.append(time.monotonic() - begin)
            seen.hints_ms.add(refusal.retry_after_ms)
            await asyncio.sleep(refusal.retry_after_ms / 1000)


async def offer(address: str, clients: int, seconds: float, seen: ObservedAnswers) -> None:
    client = AsyncClient(address)
    until = time.monotonic() + seconds
    await asyncio.gather(*(insist(client, until, seen) for _ in range(clients)))
    await client.close()


def resident_bytes(cluster: Cluster) -> dict[str, int]:
    pages = {p.spec.id: Path(f"/proc/{p.pid}/statm").read_text().split()[1] for p in cluster.processes}
    return {name: int(count) * PAGE for name, count in pages.items()}


@pytest.mark.slow
@pytest.mark.sweep  # seconds of it are in tests/services/frontend/test_limits.py
async def test_ten_times_the_capacity_is_refused_quickly_without_harm(small: Cluster) -> None:
    usual, crowded = ObservedAnswers(), ObservedAnswers()
    await offer(small.grpc_address, CAPACITY, USUAL_S, ObservedAnswers())  # all is there
    before = resident_bytes(small)
    for _ in range(ROUNDS):  # in turn, so that whatever else this machine does is beside both
        await offer(small.grpc_address, CAPACITY, USUAL_S, usual)
        await offer(small.grpc_address, 10 * CAPACITY, CROWDED_S, crowded)
    after = resident_bytes(small)
    assert not usual.refused
    refusals = sorted(crowded.refused)
    p50, p99 = (refusals[int(share * len(refusals))] for share in (0.5, 0.99))
    slower = statistics.median(crowded.served) / statistics.median(usual.served)
    print(f"{len(refusals)} refusals, p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms")
    print(f"accepted requests took {slower:.2f} times as long as without the crowd")
    assert len(refusals) > 100
    assert crowded.hints_ms == {HINT_MS}
    assert p50 < statistics.median(crowded.served) / 2, "the clients share two cores with the cluster"
    assert slower < 4
    assert all(after[name] - before[name] < 64 << 20 for name in before), "memory stays where it was"
    leaves_nothing_behind(small)
