"""The end-to-end check on a GPU: `python -m pytest -m gpu tests/e2e/test_cuda.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quire.client import Client
from quire.cluster import Cluster
from quire.outputs import RequestOutput
from quire.params import SamplingParams
from tests.e2e.conftest import running_cluster
from tests.e2e.kv.test_kv_handover import metric_total, questions
from tests.e2e.outputs.test_mixed_streams import STREAMS, ask, conversations
from tests.e2e.outputs.test_same_text import QUESTION, through_openai, through_reflection
from tests.waiting import until_idle, worker_of
from tools.evals import Item, check

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cuda_cluster() -> Iterator[Cluster]:
    with running_cluster(worker={"device": "cuda", "num_blocks": 2000}) as running:
        yield running


def test_the_bundled_model_knows_its_answers_on_the_gpu(cuda_cluster: Cluster) -> None:
    command = [
        sys.executable,
        "-m",
        "tools.evals",
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


def num_right(items: list[Item], results: list[RequestOutput]) -> int:
    """Number of right answers; truncated answers count if they begin correctly."""
    cut = [result.outputs[0].finish_reason == "length" for result in results]
    return sum(
        item.expected.startswith(result.text) if short else check(item, result.text).right
        for item, result, short in zip(items, results, cut, strict=True)
    )


def test_streams_that_preempt_each_other_stay_right_on_the_gpu() -> None:
    items = conversations()
    settings = {"device": "cuda", "num_blocks": 300, "block_size": 16, "max_num_seqs": STREAMS}
    with running_cluster(worker=settings) as cluster, Client(cluster.grpc_address) as client:
        results = ask(client, items, at_a_time=STREAMS)
        until_idle(client)
        status = worker_of(client)
    assert num_right(items, results) >= 0.95 * len(items)
    assert status.work.preemptions > 0


WAYS: dict[str, dict[str, dict[str, object]]] = {
    "kernel by kernel": {"worker": {"cuda_graphs": False}},
    "chunks kernel by kernel": {"worker": {"cuda_graph_chunks": False}},
    "reference attention": {"worker": {"attention_backend": "reference"}},
    "one step in flight": {"scheduler": {"max_steps_in_flight": 1}},
    "two steps in flight": {"scheduler": {"max_steps_in_flight": 2}},
    "three steps in flight": {"scheduler": {"max_steps_in_flight": 3}},
    "small blocks": {"worker": {"block_size": 16, "num_blocks": 6000}},
}


def texts(settings: dict[str, dict[str, object]]) -> list[str]:
    """Greedy answers in float32, where no choice is a near tie, several at a time."""
    worker = {"device": "cuda", "dtype": "float32", "num_blocks": 2000, **settings.get("worker", {})}
    with running_cluster(**{**settings, "worker": worker}) as cluster, Client(cluster.grpc_address) as client:
        return [result.text for result in ask(client, conversations()[:32], at_a_time=8)]


@pytest.fixture(scope="module")
def usual_texts() -> list[str]:
    return texts({})


@pytest.mark.parametrize("way", WAYS)
def test_the_text_does_not_depend_on_how_steps_are_run(usual_texts: list[str], way: str) -> None:
    assert texts(WAYS[way]) == usual_texts


EIGHT_BITS: dict[str, dict[str, object]] = {
    "cache": {"kv_cache_dtype": "fp8"},
    "layers": {"quantization": "fp8"},
    "blocks": {"quantization": "fp8_block"},
}


@pytest.mark.parametrize("settings", EIGHT_BITS.values(), ids=EIGHT_BITS)
def test_8_bits_know_the_answers(settings: dict[str, object]) -> None:
    items = conversations()
    worker = {"device": "cuda", "num_blocks": 2000, **settings}
    with running_cluster(worker=worker) as cluster, Client(cluster.grpc_address) as client:
        results = ask(client, items, at_a_time=16)
    print("8 bits:", settings, num_right(items, results), "of", len(items))
    assert num_right(items, results) >= 0.8 * len(items)


def test_small_steps_in_graphs_know_the_answers() -> None:
    """In 16 bits with blocks of 64, whose keys and values the copy engine loads."""
    items = conversations()
    worker = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "triton", "num_blocks": 2000}
    with running_cluster(worker=worker) as cluster, Client(cluster.grpc_address) as client:
        results = ask(client, items, at_a_time=16)
    assert num_right(items, results) >= 0.95 * len(items)


def test_prompts_computed_apart_get_the_same_answers_on_gpus() -> None:
    """With two GPUs each worker has one."""
    asked = questions(6)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)

    def say(client: Client) -> list[str]:
        return [client.chat(messages, params)[0].text for messages in asked]

    worker = {"device": "cuda", "num_blocks": 2000}
    with running_cluster(worker=worker) as cluster, Client(cluster.grpc_address) as one:
        expected = say(one)
    apart = {"prefill_threshold": 16}
    with running_cluster(apart=(1, 1), worker=worker, scheduler=apart) as cluster, Client(cluster.grpc_address) as two:
        same = sum(a == b for a, b in zip(say(two), expected, strict=True))
        assert metric_total(cluster, "quire_scheduler_handovers_total") >= 4
        assert metric_total(cluster, "quire_scheduler_blocks_unowned") == 0
    assert same >= 5, "rounding differs with what is computed together"
