"""An interrupted start leaves no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from quire.cluster import Cluster, ClusterOptions
from quire.cluster.process import ServiceProcess

LONG_ENOUGH_S = 0.3  # for who does not wait


class _CutShort(ThreadPoolExecutor):
    """Executor interrupted by a signal while it creates a thread, which runs but is not recorded."""

    def __init__(self) -> None:
        super().__init__(1)
        self.forking = threading.Event()
        self.thread = threading.Thread()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.thread = threading.Thread(target=fn, args=args, kwargs=kwargs)
        self.thread.start()
        assert self.forking.wait(60)
        raise KeyboardInterrupt


def test_a_child_that_is_just_being_forked_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(ClusterOptions(http_port=0, grpc_port=0, redis="none"))
    starter = cluster._starter = _CutShort()
    start = ServiceProcess.start

    def slow_start(process: ServiceProcess) -> None:
        starter.forking.set()
        threading.Event().wait(LONG_ENOUGH_S)
        start(process)

    monkeypatch.setattr(ServiceProcess, "start", slow_start)
    with pytest.raises(KeyboardInterrupt):
        cluster.start()
    starter.thread.join()
    begun = [process for process in cluster.processes if process.pid is not None]
    left = [process.spec.id for process in begun if process.running]
    for process in begun:
        process.close()
    assert len(begun) == 1
    assert left == []
