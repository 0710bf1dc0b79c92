"""Document scores of queries while workers and schedulers are killed: each score is the same as without disturbance,
though workers cache only two queries at a time."""

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

SIZE = 8192  # of a token's vector: 32 of them are the least room that a worker can have
QUERY_LENGTH, DOCUMENT_LENGTH = 12, 40
QUERIES = [f"the sum of {'two ' * number}" for number in range(6)]
DOCUMENTS = [f"{'and two ' * (number % 17)} hello four {number}" for number in range(60)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two workers with small steps, so that there are many steps."""
    encoder_folder.write_colbert(tmp_path, SIZE, QUERY_LENGTH, DOCUMENT_LENGTH, num_hidden_layers=6)
    worker = {"threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 128, "query_cache_mb": 1}
    settings = {"worker": worker, "scheduler": SCHEDULER}
    with Cluster(
        ClusterOptions(model=str(tmp_path), workers=2, http_port=0, grpc_port=0, settings=settings)
    ) as running:
        yield running


def scores(client: Client) -> list[list[float]]:
    """Scores of each query with all documents, and of all queries at once with one document each."""
    of_queries = [client.score(query, DOCUMENTS) for query in QUERIES]
    return [*of_queries, client.score(QUERIES * 10, DOCUMENTS)]


@pytest.mark.parametrize("victim", ["worker-0", "scheduler-0", "worker-1"])
def test_scores_are_unchanged_when_services_are_killed(cluster: Cluster, victim: str) -> None:
    with Client(cluster.grpc_address) as client:
        calm = scores(client)
        found = kill_while_answering(cluster, victim, lambda: scores(client), num_askers=3)
    assert len(found) > 3, "each thread asks once more when the victim is back"
    assert np.ptp(calm[0]) > 0.5, "the test would not tell them apart"
    for again in found:
        assert all(np.allclose(one, other, atol=1e-4) for one, other in zip(again, calm, strict=True))
