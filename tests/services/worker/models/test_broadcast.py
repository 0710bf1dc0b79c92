"""Member of a trainer's group: broadcasts arrive unchanged, and leaving the group leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.services.worker.models.loading.broadcast.gloo_member import GlooMember
from quire.services.worker.models.loading.broadcast.weights_groups import DTYPES, WeightsGroups
from quire.shared.errors import FailedPrecondition, InvalidArgument, Unavailable
from quire.shared.pb.common.v1.weights_stream_pb2 import BroadcastContent, TensorHead
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.weights_group import _member, _store

PATIENCE_S = 60.0
LONGER_THAN_A_TEST_S = 500.0  # longer than any test, so that none passes by a timeout
SHAPES = {"F32": [7, 3], "BF16": [], "U8": [1], "F16": [0, 4], "I64": [5]}


def order_of(store: Any, size: int, timeout_s: float = PATIENCE_S) -> pb.JoinWeightsGroup:
    return pb.JoinWeightsGroup(
        master_address="127.0.0.1", master_port=store.port, first_rank=1, world_size=size, group_name="g",
        backend="gloo", timeout_ms=int(timeout_s * 1000),
    )  # fmt: skip


class Trainer:
    """Rank 0, with one worker's only rank as the other member."""

    def __init__(self) -> None:
        self.groups = WeightsGroups(torch.device("cpu"))
        self.store = _store("127.0.0.1", 2, PATIENCE_S)
        self.order = order_of(self.store, 2)
        with ThreadPoolExecutor(1) as joining:
            joined = joining.submit(self.groups.join, self.order)
            self.group = _member(self.store, "g", "gloo", 2, PATIENCE_S)
            joined.result()

    def send(self, tensor: torch.Tensor) -> Any:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        return self.group.broadcast([tensor.contiguous().reshape(-1).view(torch.uint8)], options)

    @property
    def process(self) -> Any:
        return process_of(self.groups)


def process_of(groups: WeightsGroups) -> Any:
    """Returns the child process of a group's member."""
    member = groups.find("g").member
    assert isinstance(member, GlooMember)
    return member._process


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.groups.leave("g")


def expected(heads: list[TensorHead], timeout_ms: int = 60_000) -> pb.ExpectedBroadcast:
    return pb.ExpectedBroadcast(content=BroadcastContent(group_name="g", timeout_ms=timeout_ms), tensors=heads)


def test_every_kind_of_tensor_is_received_unchanged(trainer: Trainer) -> None:
    """Empty tensors are not sent; a second update with smaller tensors follows a larger one."""
    for update in range(2):
        tensors = {
            dtype: torch.randint(100, SHAPES.get(dtype, [300 - 200 * update])).to(torch_dtype)
            for dtype, torch_dtype in DTYPES.items()
        }
        heads = [TensorHead(name=name, dtype=name, shape=tensor.shape) for name, tensor in tensors.items()]
        sent = [trainer.send(tensor) for tensor in tensors.values() if tensor.numel()]
        with trainer.groups.receiving(expected(heads)) as coming:
            for name, tensor in coming:
                assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
                assert tensor.tolist() == tensors[name].tolist()
        assert [work.wait() for work in sent]
        assert trainer.store.check([f"g/receiving/{update}"])


def test_leaving_a_group_ends_its_process(trainer: Trainer) -> None:
    first, open_files = trainer.process, len([*Path("/proc/self/fd").iterdir()])
    trainer.groups.leave("g")
    assert first.returncode is not None
    with pytest.raises(FailedPrecondition, match="not in a group named 'g'"):
        trainer.groups.find("g")
    trainer.groups.leave("g")
    assert len([*Path("/proc/self/fd").iterdir()]) < open_files


@pytest.mark.parametrize(
    ("num_elements", "error", "said"),
    [
        (99, InvalidArgument, "has sent more bytes"),
        (4, InvalidArgument, "has sent fewer bytes"),
        (0, Unavailable, "was not received"),
    ],
)
def test_unexpected_tensors_end_the_group(
    trainer: Trainer, num_elements: int, error: type[Exception], said: str
) -> None:
    """Unexpected tensors end the group, but not the worker.

    With an empty tensor, the trainer has left already.
    """
    process = trainer.process
    with trainer.groups.receiving(expected([])):
        pass  # no tensor is expected
    if num_elements:
        sent = trainer.send(torch.ones(num_elements))
    else:
        del trainer.group
    heads = [TensorHead(name="a.weight", dtype="F32", shape=[10])]
    with (
        pytest.raises(error, match=rf"group 'g': a.weight \(tensor 1 of 1\).* {said}"),
        trainer.groups.receiving(expected(heads)) as coming,
    ):
        list(coming)
    assert process.returncode is not None
    with pytest.raises(FailedPrecondition):
        trainer.groups.find("g")
    if num_elements:
        del sent


def test_silent_trainer_times_out(trainer: Trainer) -> None:
    heads = [TensorHead(name="a", dtype="F32", shape=[10])]
    with (
        pytest.raises(Unavailable, match=r"group 'g': a \(tensor 1 of 1\) was not received within 0.05 s"),
        trainer.groups.receiving(expected(heads, timeout_ms=50)) as coming,
    ):
        list(coming)


def test_joining_without_a_trainer_fails() -> None:
    groups = WeightsGroups(torch.device("cpu"))
    place = {"master_port": 1, "first_rank": 1, "world_size": 2, "group_name": "g", "timeout_ms": 100}
    with pytest.raises(Unavailable, match=r"group 'g': as rank 1 of 2 at 127.0.0.1:1: "):
        groups.join(pb.JoinWeightsGroup(master_address="127.0.0.1", backend="gloo", **place))
    with pytest.raises(InvalidArgument, match="backend: nccl requires GPUs, and this worker runs on cpu"):
        groups.join(pb.JoinWeightsGroup(master_address="127.0.0.1", backend="nccl", **place))


class ReceivingRanks:
    """A trainer and ranks of workers, each on its own thread."""

    def __init__(self, count: int) -> None:
        self.store = _store("127.0.0.1", count + 1, LONGER_THAN_A_TEST_S)
        self.ranks = [WeightsGroups(torch.device("cpu"), rank) for rank in range(count)]
        self.pool = ThreadPoolExecutor(count)
        order = order_of(self.store, count + 1, LONGER_THAN_A_TEST_S)
        joined = [self.pool.submit(groups.join, order) for groups in self.ranks]
        self.group = _member(self.store, "g", "gloo", count + 1, LONGER_THAN_A_TEST_S)
        for one in joined:
            one.result()

    def receive(self, rank: int, heads: list[TensorHead], each: Callable[[str], None] = lambda _: None) -> None:
        with self.ranks[rank].receiving(expected(heads, int(LONGER_THAN_A_TEST_S * 1000))) as coming:
            for name, _ in coming:
                each(name)


@pytest.fixture
def receiving_ranks() -> Iterator[ReceivingRanks]:
    made = ReceivingRanks(3)
    yield made
    for groups in made.ranks:
        groups.leave("g")
    made.pool.shutdown()


HEADS = [TensorHead(name=name, dtype="F32", shape=[10]) for name in ("a", "b")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("failing", range(3))
def test_failed_member_ends_the_wait_of_others_with_its_error(receiving_ranks: ReceivingRanks, failing: int) -> None:
    """Any node of the broadcast tree may fail: the trainer sends no more, and its group stays open."""

    def refuse(_: str) -> None:
        raise InvalidArgument("b is no tensor of this model", field="names")

    waiting = [
        receiving_ranks.pool.submit(receiving_ranks.receive, rank, HEADS, *([refuse] if rank == failing else []))
        for rank in range(3)
    ]
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    sent = receiving_ranks.group.broadcast([torch.ones(10).view(torch.uint8)], options)
    for rank, one in enumerate(waiting):
        said = "b is no tensor" if rank == failing else r"another rank of the group has failed: b is no tensor"
        with pytest.raises(InvalidArgument, match=said) as raised:
            one.result()
        assert raised.value.field == "names"
        with pytest.raises(FailedPrecondition):
            receiving_ranks.ranks[rank].find("g")
    del sent


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_worker_ends_the_wait_of_other_members(receiving_ranks: ReceivingRanks) -> None:
    """The process of its group member detects its exit."""
    waiting = [receiving_ranks.pool.submit(receiving_ranks.receive, rank, HEADS) for rank in (0, 1)]
    process = process_of(receiving_ranks.ranks[2])
    assert process.stdin is not None
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), process.stdin.fileno())  # closes the pipe, as if the process had exited
    for one in waiting:
        with pytest.raises(
            Unavailable,
            match="another rank of the group has failed: a rank of the group has left; create the group again",
        ):
            one.result()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_leaving_member_does_not_wait(receiving_ranks: ReceivingRanks) -> None:
    """The other members do not wait either."""
    waiting = [receiving_ranks.pool.submit(receiving_ranks.receive, rank, HEADS) for rank in range(3)]
    receiving_ranks.store.wait(["g/receiving/0"], timedelta(seconds=LONGER_THAN_A_TEST_S))  # any rank
    receiving_ranks.ranks[0].interrupt("g")
    receiving_ranks.ranks[0].interrupt("another")
    for one in waiting:
        with pytest.raises(Unavailable, match=r"group 'g': a \(tensor 1 of 2\)"):
            one.result()
