"""The end-to-end check on a GPU: `python -m pytest -m gpu tests/e2e/test_cuda.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quire.client import Client
from quire.cluster import Cluster
from quire.tiny.skills import check
from tests.e2e.conftest import running_cluster
from tests.e2e.test_mixed_streams import STREAMS, ask, conversations, worker_of
from tests.e2e.test_same_text import QUESTION, through_openai, through_reflection

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cuda_cluster() -> Iterator[Cluster]:
    with running_cluster(worker={"device": "cuda", "num_blocks": 2000}) as running:
        yield running


def test_the_bundled_model_knows_its_answers_on_the_gpu(cuda_cluster: Cluster) -> None:
    command = [
        sys.executable,
        "-m",
        "quire",
        "eval",
        "--address",
        cuda_cluster.grpc_address,
        "--per-size",
        "10",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    score = json.loads(done.stdout)
    print(score)
    assert score["all"]["right"] >= 0.98


def test_every_way_to_ask_gives_the_right_answer_on_the_gpu(cuda_cluster: Cluster) -> None:
    with Client(cuda_cluster.grpc_address) as client:
        answers = {
            through_reflection(cuda_cluster.grpc_address),
            through_openai(cuda_cluster.http_address, stream=True),
            client.chat([{"role": "user", "content": QUESTION}])[0].text,
        }
    assert answers == {"68"}


def test_streams_that_preempt_each_other_stay_right_on_the_gpu() -> None:
    items = conversations()
    settings = {"device": "cuda", "num_blocks": 300, "block_size": 16, "max_num_seqs": STREAMS}
    with running_cluster(worker=settings) as cluster, Client(cluster.grpc_address) as client:
        results = ask(client, items, at_a_time=STREAMS)
        status = worker_of(client)
    cut = [result.outputs[0].finish_reason == "length" for result in results]
    right = [
        item.expected.startswith(result.text) if short else check(item, result.text).right
        for item, result, short in zip(items, results, cut, strict=True)
    ]
    assert sum(right) >= 0.95 * len(items)
    assert status.work.preemptions > 0
    assert status.blocks.used == 0
