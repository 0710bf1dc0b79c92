"""Killing a service while it works, verified by the counters of the surviving services."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quire.cluster import Cluster
from quire.shared.errors import Unavailable
from quire.shared.pb.admin.v1 import admin_pb2
from tests.chaos.conftest import services
from tests.chaos.test_workers import pid
from tests.e2e.kv.test_kv_handover import metric_total
from tests.e2e.observability.test_metrics import page
from tests.waiting import until

Answer = TypeVar("Answer")


def kill_while_answering(cluster: Cluster, victim: str, ask: Callable[[], Answer], num_askers: int) -> list[Answer]:
    """Returns the answers of clients that ask repeatedly until the victim has been killed while working, and once more
    after its restart. Raises the refusal of any of them."""
    killed = threading.Event()

    def ask_on() -> list[Answer]:
        found = []
        while not killed.is_set():
            found.append(ask())
        return [*found, ask()]

    with ThreadPoolExecutor(num_askers) as pool:
        asking = [pool.submit(ask_on) for _ in range(num_askers)]
        try:
            kill_when_busy(cluster, victim)
        finally:
            killed.set()
    return [answer for one in asking for answer in one.result()]


def kill_when_busy(cluster: Cluster, victim: str) -> None:
    """Kills the victim once it has work, while other threads send requests; again if the counters show that nothing was
    interrupted."""
    process = cluster.process(victim)
    while not num_interrupted(cluster, victim):
        before = process.restarts
        until(lambda: process.ready.is_set() and process.running and has_work(cluster, victim))
        os.kill(pid(cluster, victim), signal.SIGKILL)
        until(lambda: process.restarts > before)  # noqa: B023 - of this round


def has_work(cluster: Cluster, victim: str) -> bool:
    """Returns whether a worker runs or queues sequences; for a scheduler, whether any worker does."""
    try:
        found = services(cluster.grpc_address).values()
    except Unavailable:  # it has only just come
        return False
    workers = [one for one in found if one.role == admin_pb2.ROLE_WORKER]
    return any(one.running or one.waiting for one in workers if victim in (one.id, "scheduler-0"))


def num_interrupted(cluster: Cluster, victim: str) -> float:
    """Number of sequences that the victim had when it was killed, counted by surviving services."""
    if victim.startswith("worker"):
        return metric_total(cluster, "quire_scheduler_sequences_moved_total")
    return page(cluster.http_address)["quire_frontend_resubmitted_sequences_total"]
