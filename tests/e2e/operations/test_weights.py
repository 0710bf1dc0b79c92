"""Weight updates of a cluster of real processes with many running streams, also when a worker dies during one."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import Client, LLMEngine, SamplingParams, bundled
from quire.async_client import AsyncClient
from quire.cli.main import main
from quire.cluster import Cluster
from quire.shared import weights_memory
from quire.shared.errors import InvalidArgument, ResourceExhausted, Unavailable
from quire.shared.pb.admin.v1 import admin_pb2
from tests.bundled_text import PREFIX
from tests.e2e.conftest import running_cluster
from tests.waiting import until

PROMPT = "Once upon a time there was a boy who counted: one, two, three, four,"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
LONG = SamplingParams(temperature=0, max_tokens=320, ignore_eos=True)  # seconds: they run when the update comes
SETTINGS: dict[str, Any] = {"threads": 1, "num_blocks": 400, "dtype": "float32"}
NUM_STREAMS = 16
NORM = "model.layers.0.input_layernorm.weight"
STORED = f"{PREFIX}{NORM}"  # in the file of the bundled model


def folder_of(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(bundled.FOLDER, path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return path


def shake(seed: int, strength: float = 0.2) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        noise = torch.Generator().manual_seed(seed)
        for tensor in tensors.values():
            tensor.add_((torch.randn(tensor.shape, generator=noise) * strength * tensor.float().std()).to(tensor))

    return change


def lack(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[STORED]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for seed in (1, 2):
        folder_of(root / f"step-{seed}", shake(seed))
    folder_of(root / "wrong", lack)
    return root


@pytest.fixture(scope="module")
def cluster(folders: Path) -> Iterator[Cluster]:
    worker = SETTINGS | {"weights_folders": [str(folders)]}
    with running_cluster(workers=2, schedulers=2, worker=worker) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.grpc_address) as connected:
        yield connected


def fresh(folder: Path) -> list[int]:
    with LLMEngine(str(folder), **SETTINGS) as engine:
        engine.add_request("one", PROMPT, GREEDY)
        while engine.has_unfinished_requests():
            (output,) = engine.step()
        return list(output.outputs[0].token_ids)


def versions(client: Client) -> dict[str, str]:
    return {s.id: s.weight_version for s in client.status() if s.role == admin_pb2.ROLE_WORKER}


def num_running(client: Client) -> int:
    return sum(s.running for s in client.status() if s.role == admin_pb2.ROLE_WORKER)


def is_updated(client: Client, folder: str, version: str) -> bool:
    """Updates the weights; a worker that ended meanwhile fails the update, which then changes nothing."""
    try:
        return client.update_weights_from_disk(folder, version, "keep") == version
    except Unavailable:
        return False


def test_a_folder_takes_the_place_of_the_weights_while_streams_run(
    cluster: Cluster, client: Client, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (before,) = client.generate(PROMPT, GREEDY)
    assert before.weight_version == "0"

    async def streams() -> list[str]:
        many = AsyncClient(cluster.grpc_address)
        asked = [asyncio.ensure_future(many.generate(f"{PROMPT} {i}", LONG)) for i in range(NUM_STREAMS)]
        await asyncio.to_thread(until, lambda: num_running(client) > 4)
        version = await asyncio.to_thread(client.update_weights_from_disk, "step-1", "step-1")
        assert version == "step-1"
        outputs = await asyncio.gather(*asked)
        await many.close()
        assert all(len(output.outputs[0].token_ids) == LONG.max_tokens for output in outputs)
        return [output.weight_version for output in outputs]

    assert set(asyncio.run(streams())) <= {"0", "step-1"}
    assert set(versions(client).values()) == {"step-1"}
    for _ in range(2):  # on either worker
        (after,) = client.generate(PROMPT, GREEDY)
        assert (after.weight_version, after.outputs[0].token_ids) == ("step-1", fresh(folders / "step-1"))
    assert after.outputs[0].token_ids != before.outputs[0].token_ids
    body = {"prompt": PROMPT, "max_tokens": 4, "model": bundled.FOLDER.name}
    url = f"http://{cluster.http_address}/v1/completions"
    body["model"] = httpx.get(f"http://{cluster.http_address}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(url, json=body, timeout=60).json()
    assert answer["choices"][0]["weight_version"] == "step-1"
    assert main(["weights", str(folders / "step-2"), "--mode", "abort", "--address", cluster.grpc_address]) == 0
    assert capsys.readouterr().out == f"weights: {client.generate(PROMPT, GREEDY)[0].weight_version}\n"


def test_what_does_not_fit_is_refused_by_all(client: Client, folders: Path, tmp_path: Path) -> None:
    before = client.generate(PROMPT, GREEDY)[0]
    with pytest.raises(InvalidArgument, match=NORM):
        client.update_weights_from_disk("wrong")
    with pytest.raises(InvalidArgument, match="must be in one of the worker's weights_folders"):
        client.update_weights_from_disk(str(bundled.FOLDER))
    with pytest.raises(InvalidArgument, match="is not a folder"):
        client.update_weights_from_disk("nowhere")
    after = client.generate(PROMPT, GREEDY)[0]
    assert (after.weight_version, after.outputs) == (before.weight_version, before.outputs)


def test_trainer_tensors_are_streamed(client: Client, folders: Path) -> None:
    tensors = load_file(next((folders / "step-1").glob("*.safetensors")))
    assert client.update_weights_from_tensor(tensors.items(), "streamed", "abort") == "streamed"
    wanted = fresh(folders / "step-1")
    for _ in range(2):
        (after,) = client.generate(PROMPT, GREEDY)
        assert (after.weight_version, after.outputs[0].token_ids) == ("streamed", wanted)
    client.sleep(2)
    client.wake_up()
    assert client.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == wanted
    del tensors[STORED]
    with pytest.raises(InvalidArgument, match=NORM):
        client.update_weights_from_tensor(tensors.items(), "wrong")
    assert set(versions(client).values()) == {"streamed"}


@pytest.mark.slow
def test_worker_that_cannot_store_a_stream_reports_it_and_keeps_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, variable in (("run", "XDG_RUNTIME_DIR"), ("tmp", "TMPDIR")):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / name))
    tensors = load_file(next(bundled.FOLDER.glob("*.safetensors")))
    worker = SETTINGS | {"weights_folders": [str(tmp_path)]}
    with running_cluster(redis="none", worker=worker) as cluster, Client(cluster.grpc_address) as client:
        before = client.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        client.update_weights_from_tensor(tensors.items(), "first", "abort")
        shutil.rmtree(tmp_path / "tmp")
        for _ in range(10):  # wherever in the stream the refusal meets what is being sent
            with pytest.raises(ResourceExhausted, match="a stream of weights cannot be stored"):
                client.update_weights_from_tensor(tensors.items(), "streamed", "abort")
        assert client.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == before
        (tmp_path / "tmp").mkdir()
        assert client.update_weights_from_tensor(tensors.items(), "streamed", "abort") == "streamed"


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Shared memory segments of this process's weights that exist."""
    mark = secrets.token_hex(8)
    marked = SimpleNamespace(token_hex=lambda size: mark + secrets.token_hex(size - 8))
    monkeypatch.setattr("quire.weights.memory.secrets", marked)
    return lambda: [*weights_memory.SEGMENTS.glob(f"{weights_memory.PREFIX}{mark}*")]


def test_trainer_tensors_are_read_from_shared_memory(
    client: Client, folders: Path, segments: Callable[[], list[Path]]
) -> None:
    """All workers read them from shared memory, which is freed afterwards; cached prefixes are invalidated."""
    client.update_weights_from_disk("step-1", "before")
    client.generate(PROMPT, GREEDY)
    tensors = load_file(next((folders / "step-2").glob("*.safetensors")))
    assert client.update_weights_from_ipc(tensors.items(), "shown", "keep") == "shown"
    assert set(versions(client).values()) == {"shown"}
    wanted = fresh(folders / "step-2")
    (after,) = client.generate(PROMPT, GREEDY)
    assert (after.weight_version, after.outputs[0].token_ids, after.cached_tokens) == ("shown", wanted, 0)
    client.sleep(2)
    client.wake_up()
    assert client.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == wanted
    for change, said in ((lack, NORM), (lambda found: found.update({STORED: torch.zeros(3)}), NORM)):
        wrong = dict(tensors)
        change(wrong)
        with pytest.raises(InvalidArgument, match=said):
            client.update_weights_from_ipc(wrong.items(), "wrong")
    assert set(versions(client).values()) == {"shown"}
    assert segments() == []


TRAINER = """
import os, sys, torch
from safetensors.torch import load_file
from quire.weights import memory as weights_memory
from quire.client import Client
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1.weights_stream_pb2 import WeightsPiece

def dies_behind(messages):
    for message in messages:
        if message.piece.shared.runs:
            print(message.piece.shared.runs[0].segment, flush=True)
        if message.piece.HasField("end"):
            os.kill(os.getpid(), 9)
        yield message

client = Client(sys.argv[1])
with weights_memory.messages(admin_pb2.UpdateWeightsRequest(mode=1), load_file(sys.argv[2]).items()) as messages:
    client._admin()._send_weights(dies_behind(messages))
"""


@pytest.mark.slow
def test_a_trainer_that_is_killed_changes_nothing(client: Client, cluster: Cluster, folders: Path) -> None:
    client.update_weights_from_disk("step-1", "good")
    file = next((folders / "step-2").glob("*.safetensors"))
    command = [sys.executable, "-c", TRAINER, cluster.grpc_address, str(file)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    left = weights_memory.SEGMENTS / ended.stdout.split()[0]
    assert left.exists()  # at once: any trainer on this machine removes it
    assert ended.returncode == -signal.SIGKILL
    (after,) = client.generate(PROMPT, GREEDY)
    assert (after.weight_version, after.outputs[0].token_ids) == ("good", fresh(folders / "step-1"))
    until(lambda: is_shown(client, load_file(file)))
    assert client.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == fresh(folders / "step-2")
    assert not left.exists()


def is_shown(client: Client, tensors: dict[str, torch.Tensor]) -> bool:
    """Publishes the weights; an abandoned update may still be running."""
    try:
        return client.update_weights_from_ipc(tensors.items(), "next") == "next"
    except Unavailable:
        return False


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_worker_that_is_killed_ends_on_the_version_of_the_others(client: Client, cluster: Cluster) -> None:
    client.update_weights_from_disk("step-1", "first")
    for service in client.status():
        if service.role == admin_pb2.ROLE_WORKER:
            os.kill(service.pid, signal.SIGKILL)
            break
    until(lambda: is_updated(client, "step-2", "second"))
    until(lambda: list(versions(client).values()) == ["second", "second"])
    assert {answer.weight_version for answer in client.generate([PROMPT] * 4, GREEDY)} == {"second"}


@pytest.mark.slow
def test_ranks_change_together(folders: Path) -> None:
    worker = SETTINGS | {"tensor_parallel_size": 2, "weights_folders": [str(folders)]}
    with running_cluster(worker=worker) as cluster, Client(cluster.grpc_address) as client:
        (before,) = client.generate(PROMPT, GREEDY)
        with pytest.raises(InvalidArgument, match=NORM):
            client.update_weights_from_disk("wrong")
        (again,) = client.generate(PROMPT, GREEDY)
        assert (again.outputs, again.weight_version) == (before.outputs, "0")
        client.update_weights_from_disk("step-1", "step-1", "keep")
        (after,) = client.generate(PROMPT, GREEDY)
        assert (after.outputs[0].token_ids, after.weight_version) == (fresh(folders / "step-1"), "step-1")
        tensors = load_file(next((folders / "step-2").glob("*.safetensors")))
        client.update_weights_from_tensor(tensors.items(), "step-2")
        (after,) = client.generate(PROMPT, GREEDY)
        assert (after.outputs[0].token_ids, after.weight_version) == (fresh(folders / "step-2"), "step-2")
        client.sleep(2)
        client.wake_up()
        assert client.generate(PROMPT, GREEDY)[0].outputs == after.outputs
