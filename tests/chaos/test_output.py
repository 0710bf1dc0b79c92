"""Services keep serving when their output cannot be written."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from quire import Client, SamplingParams
from quire.cluster import Cluster, ClusterOptions
from tests.waiting import until

PATIENCE_S = 120.0

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_worker_restarts_while_output_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ClusterOptions(
        http_port=0, grpc_port=0, metrics_port=0, redis="none", settings={"worker": {"threads": 1}}
    )
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)  # the launcher's
        with Cluster(options, log=full) as cluster:
            worker = cluster.process("worker-0")
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            until(
                lambda: bool(worker.restarts and worker.ready.is_set()), what="whoever watches the processes has ended"
            )
            with Client(cluster.grpc_address) as client:
                (answer,) = client.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=8))
            assert answer.outputs[0].text
