"""Killing somebody amid work, which counters of those that are left show: what it had went on elsewhere."""

from __future__ import annotations

import os
import signal

from quire.cluster import Cluster
from tests.chaos.test_workers import pid
from tests.e2e.kv.test_kv_handover import told
from tests.e2e.observability.test_metrics import page
from tests.waiting import until


def kill_amid(cluster: Cluster, victim: str) -> None:
    """While others ask again and again: if it had nothing to do at that moment, it is killed again."""
    process = cluster.process(victim)
    while not num_interrupted(cluster, victim):
        before = process.restarts
        until(lambda: process.ready.is_set() and process.running)
        os.kill(pid(cluster, victim), signal.SIGKILL)
        until(lambda: process.restarts > before)  # noqa: B023 - of this round


def num_interrupted(cluster: Cluster, victim: str) -> float:
    """Sequences that the victim had when it was killed: who counts them lives on."""
    if victim.startswith("worker"):
        return told(cluster, "quire_scheduler_sequences_moved_total")
    return page(cluster.http_address)["quire_frontend_resubmitted_sequences_total"]
