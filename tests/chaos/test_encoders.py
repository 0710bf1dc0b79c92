"""Embedding while workers and schedulers are killed: every input gets the same vector as without disturbance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from tests.chaos.conftest import SCHEDULER
from tests.chaos.kill_helpers import kill_while_answering
from tests.e2e.encoders import encoder_folder

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

INPUTS = [[2, *([4 + i % 40] * (1 + i * 7 % 90)), 3] for i in range(200)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two workers with small steps, so that there are many steps."""
    encoder_folder.write(tmp_path, "bert", "Model", num_hidden_layers=12)
    worker = {"threads": 1, "max_num_seqs": 2, "max_num_batched_tokens": 128}
    settings = {"worker": worker, "scheduler": SCHEDULER}
    with Cluster(
        ClusterOptions(model=str(tmp_path), workers=2, http_port=0, grpc_port=0, settings=settings)
    ) as running:
        yield running


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0"])
def test_embeddings_are_unchanged_when_services_are_killed(cluster: Cluster, victim: str) -> None:
    with Client(cluster.grpc_address) as client:
        calm = np.array(client.embed(INPUTS))
        found = kill_while_answering(cluster, victim, lambda: np.array(client.embed(INPUTS)), num_askers=2)
    assert len(found) > 2, "each thread asks once more when the victim is back"
    assert all(np.allclose(vectors, calm, atol=1e-5) for vectors in found)
