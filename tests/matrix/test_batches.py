"""Every feature in a line of a batch, sent and fetched over gRPC, HTTP and from Python: equal answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

import quire.kernels.cpu
from quire import LLM, Client
from quire.cluster import Cluster
from tests.e2e.conftest import running_cluster
from tests.matrix.features import REQUESTS
from tests.matrix.requesting import ask_now, prompts, question, result_of
from tests.matrix.test_ways import NOT_OVER_HTTP, body, choices

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        quire.kernels.cpu.unavailable() is not None, reason="plain torch rounds otherwise in other batches"
    ),
]

ENDPOINT = "/v1/completions"
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("batches")
    with running_cluster(worker={"num_blocks": 2000}, frontend={"batch_folder": str(folder)}) as running:
        yield running


def over_grpc(cluster: Cluster, content: bytes) -> bytes:
    with Client(cluster.grpc_address) as client:
        batch = client.batches.create(client.files.create(content).id, ENDPOINT)
        return client.files.content(client.batches.wait(batch.id, PATIENCE_S).output_file_id)


def from_python(cluster: Cluster, content: bytes) -> bytes:
    with LLM(address=cluster.grpc_address) as llm:
        batch = llm.batches.create(llm.files.create(content).id, ENDPOINT)
        return llm.files.content(llm.batches.wait(batch.id, PATIENCE_S).output_file_id)


def over_http(cluster: Cluster, content: bytes) -> bytes:
    with (
        httpx.Client(base_url=f"http://{cluster.http_address}/v1", timeout=60) as http,
        Client(cluster.grpc_address) as client,
    ):
        file = http.post("/files", files={"file": ("in", content)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        batch = http.post("/batches", json=asked).json()
        client.batches.wait(batch["id"], PATIENCE_S)
        ended = http.get(f"/batches/{batch['id']}").json()
        return http.get(f"/files/{ended['output_file_id']}/content").content


@pytest.mark.parametrize("way", [over_grpc, over_http, from_python])
def test_batch_returns_what_a_call_returns(cluster: Cluster, way: Callable[[Cluster, bytes], bytes]) -> None:
    prompt = prompts(cluster)[0]
    asked = {name: question(prompt, name) for name in REQUESTS if name not in NOT_OVER_HTTP["whole"]}
    whole = ask_now(cluster, asked)
    lines = [
        {"custom_id": name, "method": "POST", "url": ENDPOINT, "body": body(one.prompt, one.params)}
        for name, one in asked.items()
    ]
    answered = way(cluster, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    found = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, answered.splitlines())}
    assert found.keys() == asked.keys()
    for name, told in found.items():
        said = choices(json.dumps(told))
        for sample in result_of(whole[name]).outputs:
            stop = "repetition_detected" if sample.finish_reason == "repetition" else sample.stop_reason
            assert said[sample.index] == (sample.text, sample.token_ids, sample.finish_reason, stop), name
