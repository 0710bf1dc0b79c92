"""A worker is killed while a trainer broadcasts weights: the others stop waiting and keep the old weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from quire import WeightsUpdateGroup
from quire.client import Client
from quire.cluster import Cluster
from quire.shared.errors import Unavailable
from quire.shared.pb.admin.v1 import admin_pb2
from tests.bundled_text import named_as_text
from tests.chaos.conftest import FRONTEND, WORKER, leaves_nothing_behind
from tests.chaos.test_operations import PATIENCE_S, PROMPT, SHORT, greedy_tokens
from tests.chaos.test_workers import pid
from tests.e2e.conftest import running_cluster
from tests.e2e.operations.mismatched_tensors import with_odd
from tests.e2e.operations.test_weights import folder_of, shake
from tests.e2e.operations.test_weights_group import patiently
from tests.waiting import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

LONGER_THAN_THE_TEST_S = 540.0
SENT = 3  # tensors


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Cluster with default heartbeats: on a busy machine workers are silent for a second while they import what a group
    needs, and a worker that was given up joins none."""
    with running_cluster(workers=2, worker=WORKER, frontend=FRONTEND) as running:
        yield running


def num_ready(client: Client) -> int:
    """Number of ready workers."""
    return sum(one.role == admin_pb2.ROLE_WORKER and one.state == admin_pb2.STATE_READY for one in client.status())


def test_a_worker_is_killed_while_it_receives(cluster: Cluster, tmp_path: Path) -> None:
    """The trainer keeps its group open, as one that does not check; the repeated update succeeds."""
    folder_of(tmp_path / "step-1", shake(1))
    tensors = named_as_text(load_file(next((tmp_path / "step-1").glob("*.safetensors"))))
    victim = cluster.process("worker-1")
    with Client(cluster.grpc_address) as client:
        (before,) = client.generate(PROMPT, SHORT)
        group = patiently(lambda: WeightsUpdateGroup(client, backend="gloo", timeout_s=LONGER_THAN_THE_TEST_S))
        killed: list[int] = []

        def kill_before_it_goes(tensor: Any) -> Any:
            killed.append(pid(cluster, "worker-1"))
            os.kill(killed[0], signal.SIGKILL)
            until(lambda: victim.restarts, PATIENCE_S)
            return tensor

        held = group._group  # noqa: F841 - connections stay open
        with pytest.raises(Unavailable):
            group.update(with_odd(tensors, [*tensors][SENT], kill_before_it_goes).items(), "never", "keep")
        assert len(killed) == 1
        group.close()
        until(lambda: victim.restarts == 1 and num_ready(client) == 2, PATIENCE_S)
        (after,) = client.generate(PROMPT, SHORT)
        assert (after.weight_version, after.outputs) == ("0", before.outputs)
        with patiently(lambda: WeightsUpdateGroup(client, backend="gloo")) as another:
            assert patiently(lambda: another.update(tensors.items(), "one", "keep")) == "one"
        wanted = greedy_tokens(tmp_path / "step-1")
        for _ in range(2):  # on either worker
            (after,) = client.generate(PROMPT, SHORT)
            assert (after.weight_version, after.outputs[0].token_ids) == ("one", wanted)
    leaves_nothing_behind(cluster)
