"""Weights that a trainer broadcasts in a process group with all ranks of all workers, over gloo."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, Client, WeightsUpdateGroup
from quire.cluster import Cluster
from quire.shared.errors import FailedPrecondition, InvalidArgument, Unavailable
from quire.shared.pb.admin.v1 import admin_pb2
from tests.bundled_text import named_as_text
from tests.e2e.conftest import running_cluster
from tests.e2e.operations.mismatched_tensors import with_odd
from tests.e2e.operations.test_weights import GREEDY, NORM, PROMPT, SETTINGS, folder_of, fresh, shake

Tensors = dict[str, torch.Tensor]
Result = TypeVar("Result")
UNDER_WAY = "being changed by another call"


def names_of(tensors: Tensors) -> tuple[list[str], list[Any], list[list[int]]]:
    return [*tensors], [tensor.dtype for tensor in tensors.values()], [list(t.shape) for t in tensors.values()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    for seed in (1, 2):
        folder_of(root / f"step-{seed}", shake(seed))
    return root


@pytest.fixture(scope="module")
def trained(folders: Path) -> Tensors:
    return named_as_text(load_file(next((folders / "step-1").glob("*.safetensors"))))


@pytest.fixture(scope="module")
def later(folders: Path) -> Tensors:
    return named_as_text(load_file(next((folders / "step-2").glob("*.safetensors"))))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(workers=2, schedulers=2, worker=SETTINGS) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.grpc_address) as connected:
        yield connected


def patiently(call: Callable[[], Result]) -> Result:
    """Repeats an operation: an earlier one that failed or lost its trainer may still be running."""
    while True:
        try:
            return call()
        except Unavailable as error:
            if UNDER_WAY not in error.message:
                raise
        time.sleep(0.02)


def answers(client: Client) -> set[tuple[str, tuple[int, ...]]]:
    """Returns the answers of both workers."""
    outputs = [client.generate(PROMPT, GREEDY)[0] for _ in range(2)]
    return {(output.weight_version, tuple(output.outputs[0].token_ids)) for output in outputs}


def test_two_workers_receive_broadcast_weights(client: Client, folders: Path, trained: Tensors, later: Tensors) -> None:
    """Repeated updates between answers; cached prefixes are invalidated."""
    with WeightsUpdateGroup(client, backend="gloo") as group:
        assert group.update(trained.items(), "one") == "one"
        assert answers(client) == {("one", tuple(fresh(folders / "step-1")))}
        assert group.update(later.items(), "two", "keep") == "two"
        (after,) = client.generate(PROMPT, GREEDY)
        assert (after.weight_version, after.cached_tokens) == ("two", 0)
        assert answers(client) == {("two", tuple(fresh(folders / "step-2")))}
    with pytest.raises(FailedPrecondition, match="not in a group named 'weight_update_group'"):
        client.update_weights_from_distributed(*names_of(trained))


def test_invalid_tensors_are_refused_by_name_before_the_broadcast(client: Client, trained: Tensors) -> None:
    """The group stays usable."""
    before = answers(client)
    with patiently(lambda: WeightsUpdateGroup(client, backend="gloo")) as group:
        for name, wrong, said in (
            (NORM, None, f"lacks tensors that the model needs: {NORM}"),
            ("model.extra", torch.zeros(2), "does not have: model.extra"),
            (NORM, torch.zeros(3), rf"tensor {NORM} has shape \[3\]"),
            (NORM, torch.zeros_like(trained[NORM], dtype=torch.int64), f"tensor {NORM} holds torch.int64"),
        ):
            tensors = {key: value for key, value in trained.items() if key != name}
            if wrong is not None:
                tensors[name] = wrong
            with pytest.raises(InvalidArgument, match=said):
                patiently(lambda: group.update(tensors.items(), "wrong"))  # noqa: B023 - it is called at once
        assert answers(client) == before
        assert patiently(lambda: group.update(trained.items(), "right")) == "right"


def test_invalid_requests_are_refused_by_field(client: Client, trained: Tensors) -> None:
    place: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}
    for wrong, said in (
        ({"world_size": 2}, "world_size: must be at least 3, for 2 ranks of workers from rank 1 on; got 2"),
        ({"rank_offset": 0}, "rank_offset: must be 1 to 65536, got 0"),
        ({"master_port": 70000}, "master_port: must be 1 to 65535, got 70000"),
        ({"master_address": "a b"}, "master_address: 'a b' is not a host name"),
        ({"backend": "mpi"}, "backend: must be nccl or gloo, got 'mpi'"),
        ({"backend": "nccl"}, "backend: nccl requires GPUs"),
        ({"group_name": "a/b"}, "group_name: must have 1 to 64 letters"),
        ({"timeout_s": 541}, "timeout_ms: must be 0 to 540000, got 541000"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            client.init_weights_update_group(**place | {"backend": "gloo"} | wrong)
    names, dtypes, shapes = names_of(trained)
    with pytest.raises(InvalidArgument, match="names: 1 names"):
        client.update_weights_from_distributed(names[:1], dtypes, shapes)
    with pytest.raises(InvalidArgument, match="float3 is not supported"):
        client.update_weights_from_distributed(names[:1], ["float3"], shapes[:1])
    client.destroy_weights_update_group("never-made")


@pytest.mark.slow
def test_missing_store_is_an_error_within_the_timeout(client: Client) -> None:
    with pytest.raises(Unavailable, match=r"as rank \d of 3 at 127.0.0.1:1: "):
        client.init_weights_update_group("127.0.0.1", 1, 1, 3, backend="gloo", timeout_s=0.2)


TRAINER = """
import os, sys, torch
from datetime import timedelta
from safetensors.torch import load_file
from quire import Client, WeightsUpdateGroup

send, sent = WeightsUpdateGroup._send, []

def dies_in_the_middle(group, tensor, asked):
    if len(sent) == 3:
        os.kill(os.getpid(), 9)
    sent.append(send(group, tensor, asked))
    return True

WeightsUpdateGroup._send = dies_in_the_middle
with Client(sys.argv[1]) as client:
    WeightsUpdateGroup(client, backend="gloo").update(load_file(sys.argv[2]).items(), "never", "keep")
"""


@pytest.mark.slow
def test_a_trainer_that_is_killed_in_the_middle_changes_nothing(
    client: Client, cluster: Cluster, folders: Path, trained: Tensors
) -> None:
    before = answers(client)
    file = next((folders / "step-2").glob("*.safetensors"))
    ended = subprocess.run([sys.executable, "-c", TRAINER, cluster.grpc_address, str(file)], check=False)
    assert ended.returncode == -9
    assert answers(client) == before
    with patiently(
        lambda: WeightsUpdateGroup(client, backend="gloo")
    ) as group:  # in the place of the one that it has left
        assert patiently(lambda: group.update(trained.items(), "again")) == "again"
    assert answers(client) == {("again", tuple(fresh(folders / "step-1")))}


def test_trainer_that_sends_too_little_gets_an_error_after_the_timeout(
    client: Client, folders: Path, later: Tensors
) -> None:
    before = answers(client)
    group = patiently(lambda: WeightsUpdateGroup(client, backend="gloo"))
    group.timeout_s = 1.0
    less = with_odd(later, [*later][-1], lambda _: None)
    with pytest.raises(Unavailable, match=r"was not received within 1 s"):
        group.update(less.items(), "never")
    assert answers(client) == before
    with pytest.raises(InvalidArgument, match="the group has ended"):
        group.update(later.items(), "never")
    group.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"), [(lambda tensor: tensor.double(), "more"), (lambda tensor: tensor.flatten()[:-8], "fewer")]
)
def test_a_tensor_of_another_size_is_seen(client: Client, later: Tensors, change: Any, said: str) -> None:
    """More bytes than announced, at which gloo ends its process, and fewer."""
    before = answers(client)
    group = patiently(lambda: WeightsUpdateGroup(client, backend="gloo"))
    odd = with_odd(later, NORM, change)
    with pytest.raises(InvalidArgument, match=rf"{NORM} \(tensor \d+ of \d+\): the trainer has sent {said} bytes"):
        group.update(odd.items(), "never")
    assert answers(client) == before
    group.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_over_http_a_trainer_of_plain_torch_broadcasts(
    tmp_path: Path, folders: Path, trained: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group is created by torch.distributed in addition to the default one, as trainers do; one worker."""
    key = tmp_path / "key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    frontend = {"admin_key_file": str(key)}
    with running_cluster(redis="none", worker=SETTINGS, frontend=frontend) as cluster:
        store = torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        operator = httpx.Client(
            base_url=f"http://{cluster.http_address}", headers={"authorization": f"Bearer {'k' * 40}"}, timeout=120
        )
        assert httpx.post(f"http://{cluster.http_address}/init_weights_update_group", json={}).status_code == 401
        with operator, ThreadPoolExecutor(1) as asking:
            place = {"master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": 2}
            joined = asking.submit(
                operator.post, "/init_weights_update_group", json=place | {"backend": "gloo", "group_name": "trained"}
            )
            group = as_trainers_make_it(store, "trained")
            assert joined.result().json() == {"success": True, "message": "1 ranks are in the group"}
            names, dtypes, shapes = names_of(trained)
            body = {"names": names, "dtypes": [str(dtype) for dtype in dtypes], "shapes": shapes}
            asked = asking.submit(
                operator.post,
                "/update_weights_from_distributed",
                json=body | {"group_name": "trained", "weight_version": "over http"},
            )
            for tensor in trained.values():
                torch.distributed.broadcast(tensor, group_src=0, group=group)
            told = asked.result().json()
            assert told == {"success": True, "message": "1 workers have the weights", "weight_version": "over http"}
            body["group_name"] = "trained"
            assert operator.post("/destroy_weights_update_group", json={"group_name": "trained"}).json()["success"]
            gone = operator.post("/update_weights_from_distributed", json=body)
            assert "not in a group named 'trained'" in gone.json()["error"]["message"]
            torch.distributed.destroy_process_group(group)
        with Client(cluster.grpc_address) as client:
            (after,) = client.generate(PROMPT, GREEDY)
        assert (after.weight_version, after.outputs[0].token_ids) == ("over http", fresh(folders / "step-1"))


def as_trainers_make_it(store: Any, name: str) -> Any:
    """Creates a second group, of processes outside the default one."""
    from torch.distributed import distributed_c10d

    prefixed = torch.distributed.PrefixStore(name, store)
    group, _ = distributed_c10d._new_process_group_helper(
        2, 0, [], torch.distributed.Backend("gloo"), prefixed, group_name=name, timeout=timedelta(seconds=60)
    )
    distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_of_a_worker_and_another_update(folders: Path, trained: Tensors, later: Tensors) -> None:
    """The weights are sharded among the ranks."""
    worker = SETTINGS | {"tensor_parallel_size": 2}
    with running_cluster(redis="none", worker=worker) as cluster, Client(cluster.grpc_address) as client:
        (before,) = client.generate(PROMPT, GREEDY)
        with WeightsUpdateGroup(client, backend="gloo") as group:
            (again,) = client.generate(PROMPT, GREEDY)
            assert again.outputs == before.outputs
            assert again.cached_tokens > 0  # joining forgets nothing
            with pytest.raises(InvalidArgument, match=NORM):
                group.update({**trained, NORM: torch.zeros(3)}.items())
            for version, tensors, folder in (("one", trained, "step-1"), ("two", later, "step-2")):
                group.update(tensors.items(), version, "keep")
                (after,) = client.generate(PROMPT, GREEDY)
                assert (after.weight_version, after.outputs[0].token_ids) == (version, fresh(folders / folder))
            client.sleep(1)
            client.wake_up()
            assert client.generate(PROMPT, GREEDY)[0].outputs == after.outputs
            with pytest.raises(FailedPrecondition, match="level: the weights were broadcast"):
                client.sleep(2)
            assert not client.is_sleeping()
            less = with_odd(later, NORM, lambda _: None)
            with pytest.raises(InvalidArgument, match=rf"{NORM} .* the trainer has sent more bytes"):
                group.update(less.items(), "never")  # one is left out, and a larger one comes in its place
        assert client.generate(PROMPT, GREEDY)[0].outputs == after.outputs
        client.update_weights_from_tensor(trained.items(), "streamed")
        assert client.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == fresh(folders / "step-1")


def test_an_llm_offers_the_same(cluster: Cluster) -> None:
    with LLM(address=cluster.grpc_address) as llm:
        llm.destroy_weights_update_group()
        with pytest.raises(Unavailable, match=r"as rank [12] of 3 at"):
            llm.init_weights_update_group("127.0.0.1", 1, 1, 3, backend="gloo", timeout_s=0.2)
        with pytest.raises(FailedPrecondition, match="not in a group named"):
            llm.update_weights_from_distributed([NORM], ["float32"], [[1]])
        workers = [s for s in llm.client.status() if s.role == admin_pb2.ROLE_WORKER]
        assert len(workers) == 2
