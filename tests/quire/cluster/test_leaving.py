"""Processes of a cluster that leave descendants, or do not exit when asked."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass

import pytest

from quire.cluster import Cluster, ClusterOptions
from quire.cluster.options import ServiceSpec
from quire.cluster.process import ServiceProcess

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {ready}; time.sleep(60)"


@dataclass(frozen=True, slots=True)
class Program(ServiceSpec):
    """An arbitrary program in place of a service."""

    program: tuple[str, ...] = ()

    def command(self) -> list[str]:
        return [*self.program]


def started(role: str, *program: str) -> ServiceProcess:
    process = ServiceProcess(Program(role, f"{role}-0", {}, program=program), lambda _: None, None)
    process.start()
    assert process.ready.wait(60)
    return process


def test_a_process_that_leaves_another_behind_is_restarted() -> None:
    """A descendant keeps its output open, like ranks of a killed worker."""
    process = started("worker", "/bin/sh", "-c", "sleep 60 & echo quire-worker ready id=worker-0")
    first = process.pid
    assert first is not None
    try:
        assert process.wait(60)
        process.watch(1.0)
        watching = threading.Thread(target=process.watch, args=(1e9,), daemon=True)
        watching.start()
        watching.join(60)
        assert not watching.is_alive()
        assert process.restarts == 1
    finally:
        for pid in {first, process.pid}:
            assert pid is not None
            os.killpg(pid, signal.SIGKILL)
    process.close()


def test_a_stop_that_is_interrupted_leaves_nothing_behind() -> None:
    """Ctrl-C in a notebook while a frontend drains must still end all processes."""

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    cluster = Cluster(ClusterOptions(http_port=0, grpc_port=0, redis="none"), report=interrupt)
    for role in ("frontend", "worker", "scheduler"):
        ready = f"print('quire-{role} ready id={role}-0', flush=True)"
        cluster.processes.append(started(role, sys.executable, "-c", STUBBORN.format(ready=ready)))
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster.stop(drain_timeout_s=0)
        assert [process.spec.id for process in cluster.processes if process.running] == []
    finally:
        for process in cluster.processes:
            process.close()
