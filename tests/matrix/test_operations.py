"""Operations on a cluster over gRPC, HTTP and from Python: afterwards every feature's answer is unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import grpc
import httpx
import pytest
from safetensors.torch import load_file

import quire.kernels.cpu
from quire import LLM, Client, bundled
from quire.cluster import Cluster
from quire.shared.errors import QuireError
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.admin.v1 import admin_pb2_grpc
from quire.shared.security import secret_file
from quire.weights.stream import messages
from tests.e2e.conftest import running_cluster
from tests.matrix.features import REQUESTS
from tests.matrix.requesting import ask_now, assert_same, prompts, question, result_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        quire.kernels.cpu.unavailable() is not None, reason="plain torch rounds otherwise in other batches"
    ),
]

KEY = "k" * 40
MODEL = str(bundled.FOLDER)


class OverGrpc:
    def __init__(self, cluster: Cluster) -> None:
        address = cluster.process("frontend-0").addresses["admin"]
        self._channel = grpc.insecure_channel(address)
        self._stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._key = (("authorization", f"Bearer {KEY}"),)

    def sleep(self, level: int) -> None:
        self._stub.Sleep(pb.SleepRequest(level=level), metadata=self._key)

    def wake_up(self) -> None:
        self._stub.WakeUp(pb.WakeUpRequest(), metadata=self._key)

    def update(self, version: str) -> None:
        tensors = load_file(next(bundled.FOLDER.glob("*.safetensors"))).items()
        sent = messages(pb.UpdateWeightsRequest(weight_version=version), tensors)
        self._stub.StreamWeights(sent, metadata=self._key)

    def close(self) -> None:
        self._channel.close()


class OverHttp:
    def __init__(self, cluster: Cluster) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        self._http = httpx.Client(base_url=f"http://{cluster.http_address}", headers=headers, timeout=120)

    def sleep(self, level: int) -> None:
        self._http.post("/sleep", params={"level": level}).raise_for_status()

    def wake_up(self) -> None:
        self._http.post("/wake_up").raise_for_status()

    def update(self, version: str) -> None:
        asked = {"model_path": MODEL, "weight_version": version}
        self._http.post("/update_weights_from_disk", json=asked).raise_for_status()

    def close(self) -> None:
        self._http.close()


class FromPython:
    def __init__(self, cluster: Cluster) -> None:
        self._llm = LLM(address=cluster.grpc_address)

    def sleep(self, level: int) -> None:
        self._llm.sleep(level)

    def wake_up(self) -> None:
        assert self._llm.wake_up() == []

    def update(self, version: str) -> None:
        tensors = load_file(next(bundled.FOLDER.glob("*.safetensors"))).items()
        assert self._llm.update_weights_from_ipc(tensors, version) == version

    def close(self) -> None:
        self._llm.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    key = tmp_path_factory.mktemp("keys") / "admin"
    secret_file.write(key, KEY)
    worker = {"num_blocks": 2000, "weights_folders": [MODEL]}
    with running_cluster(worker=worker, frontend={"admin_key_file": str(key)}) as running:
        yield running


@pytest.mark.parametrize("kind", [OverGrpc, OverHttp, FromPython])
def test_answers_are_unchanged_after_operations(cluster: Cluster, kind: type[OverGrpc | OverHttp | FromPython]) -> None:
    asked = {name: question(prompts(cluster)[0], name) for name in REQUESTS}
    before = ask_now(cluster, asked)
    with closing(kind(cluster)) as way, Client(cluster.grpc_address) as client:
        for level in (1, 2):
            way.sleep(level)
            assert client.is_sleeping()
            way.wake_up()
            assert not client.is_sleeping()
        way.update(kind.__name__)
    after = ask_now(cluster, asked)
    for name, answer in after.items():
        assert_same(answer, before[name], name)
        assert result_of(answer).weight_version == kind.__name__
    assert not [name for name, answer in before.items() if isinstance(answer, QuireError)]
