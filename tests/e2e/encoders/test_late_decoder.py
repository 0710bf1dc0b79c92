"""A decoder that also computes late-interaction scores: scores and chats in the same steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from tests.e2e.encoders import late_interaction_folder

pytestmark = pytest.mark.slow

QUERY = "What is 23 + 45?"
DOCUMENTS = ["68", "The lighthouse stands on a rock.", "23 and 45 are 68. " * 30, "a, b"]
CHAT = {"messages": [{"role": "user", "content": QUERY}], "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Cluster with chunked prefill."""
    folder = late_interaction_folder.write(tmp_path_factory.mktemp("late") / "model")
    worker = {"threads": 1, "dtype": "float32", "num_blocks": 1000, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    settings = {"worker": worker}
    with Cluster(ClusterOptions(model=str(folder), workers=2, http_port=0, grpc_port=0, settings=settings)) as running:
        yield running


def vectors(client: Client, texts: list[str], part: str) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    return [np.array(found) for found in client.encode(texts, pooler="all", prompt_name=part)]


def test_scores_are_computed_during_chats(cluster: Cluster) -> None:
    at = f"http://{cluster.http_address}"
    with Client(cluster.grpc_address) as client:
        (query,) = vectors(client, [QUERY], "query")
        wanted = [float((query @ one.T).max(1).sum()) for one in vectors(client, DOCUMENTS, "document")]
        said = httpx.post(f"{at}/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
        heard: list[str] = []

        def chat() -> None:
            for _ in range(10):
                answer = httpx.post(f"{at}/v1/chat/completions", json=CHAT, timeout=60).json()
                heard.append(answer["choices"][0]["message"]["content"])

        threads = [threading.Thread(target=chat) for _ in range(3)]
        for thread in threads:
            thread.start()
        found = [client.score(QUERY, DOCUMENTS) for _ in range(10)]
        client.reset_prefix_cache(preempt_running=True)  # it loses the queries' vectors, and chats continue
        found.append(client.score(QUERY, DOCUMENTS))
        for thread in threads:
            thread.join(120)
    assert "68" in said
    assert heard == [said] * 30
    assert max(wanted) - min(wanted) > 0.2, "the test would not tell them apart"
    assert all(scores == pytest.approx(wanted, abs=1e-4) for scores in found)
