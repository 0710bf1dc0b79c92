"""A model sharded among the processes of a worker, behind the same APIs."""

from __future__ import annotations

import json
import re

import httpx

from quire import bundled
from quire.cli.status import table
from quire.client import Client
from quire.cluster import Cluster
from quire.params import SamplingParams, StructuredOutput
from quire.shared.pb.admin.v1 import admin_pb2
from tests.e2e.conftest import running_cluster
from tests.pictures import data_url, shape
from tools.training.chat import prompt

EAGLE = {"method": "eagle", "model": str(bundled.FOLDER.parent / "drafters" / "eagle"), "num_speculative_tokens": 3}
QUESTION = prompt([{"role": "user", "content": "What is 23 + 45?"}], None)


def worker_of(client: Client) -> admin_pb2.ServiceStatus:
    (worker,) = (one for one in client.status() if one.role == admin_pb2.ROLE_WORKER)
    return worker


def test_two_ranks_answer_under_a_form_with_drafts_and_with_logprobs() -> None:
    worker = {"tensor_parallel_size": 2, "threads": 1, "num_blocks": 200, "speculative_config": json.dumps(EAGLE)}
    with running_cluster(worker=worker) as cluster, Client(cluster.grpc_address) as client:
        greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
        (answer,) = client.generate(QUESTION, greedy)
        assert answer.text == "68"
        formed = SamplingParams(temperature=1.0, seed=3, n=2, structured_output=StructuredOutput(regex="[1-9]{12}"))
        (answer,) = client.generate(QUESTION, formed)
        assert all(re.fullmatch("[1-9]{12}", output.text) for output in answer.outputs)
        drawn = SamplingParams(temperature=1.0, seed=7, top_p=0.9, frequency_penalty=0.5, max_tokens=40)
        once, again = (client.generate(QUESTION, drawn)[0].text for _ in range(2))
        assert once == again


def test_two_context_parallel_ranks_answer_with_drafts_and_constraints() -> None:
    """Six prompts form one long step, and so does one prompt of four times the length."""
    worker = {"context_parallel_size": 2, "threads": 1, "num_blocks": 200, "speculative_config": json.dumps(EAGLE)}
    with running_cluster(worker=worker) as cluster, Client(cluster.grpc_address) as client:
        epoch = worker_of(client).epoch
        greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
        answers = client.generate([QUESTION] * 6, greedy)
        assert [answer.text for answer in answers] == ["68"] * 6
        formed = SamplingParams(temperature=1.0, seed=3, n=4, structured_output=StructuredOutput(regex="[1-9]{90}"))
        (answer,) = client.generate(QUESTION * 4, formed)
        assert all(re.fullmatch("[1-9]{90}", output.text) for output in answer.outputs)
        assert ", 2 ranks in 2 contexts" in table(client.status())
        assert_pictures_are_refused(cluster)
        assert worker_of(client).epoch == epoch, "nothing went wrong on the way"


def assert_pictures_are_refused(cluster: Cluster) -> None:
    """Asks about a picture, which a replica of several stages or contexts has no place for."""
    parts = [{"type": "image_url", "image_url": {"url": data_url(shape("circle", "red"))}}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    answer = httpx.post(f"http://{cluster.http_address}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "media: the worker takes no pictures" in answer.json()["error"]["message"]


def test_two_stages_answer_in_micro_batches() -> None:
    worker = {"pipeline_parallel_size": 2, "threads": 1, "num_blocks": 200}
    with running_cluster(worker=worker) as cluster, Client(cluster.grpc_address) as client:
        epoch = worker_of(client).epoch
        greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
        answers = client.generate([QUESTION] * 6, greedy)
        assert [answer.text for answer in answers] == ["68"] * 6
        formed = SamplingParams(temperature=1.0, seed=3, n=3, structured_output=StructuredOutput(regex="[1-9]{12}"))
        (answer,) = client.generate(QUESTION, formed)
        assert all(re.fullmatch("[1-9]{12}", output.text) for output in answer.outputs)
        drawn = SamplingParams(temperature=1.0, seed=7, top_p=0.9, frequency_penalty=0.5, max_tokens=40)
        once, again = (client.generate(QUESTION, drawn)[0].text for _ in range(2))
        assert once == again
        assert ", 2 ranks in 2 stages" in table(client.status())
        assert_pictures_are_refused(cluster)
        with Client(worker_of(client).address) as asked:
            assert worker_of(asked).epoch == epoch, "a worker is asked itself"
        assert worker_of(client).epoch == epoch, "nothing went wrong on the way"
