"""Process groups of torch.distributed in which a trainer is rank 0 and broadcasts weights.

They are separate from the group of a worker's ranks. After a failure the state of a group's members is unknown, so the
group is left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from quire.services.worker.models.loading.broadcast.failures import RemoteFailureError
from quire.services.worker.models.loading.broadcast.gloo_member import GlooMember
from quire.services.worker.models.loading.broadcast.nccl_member import NcclMember
from quire.shared.errors import FailedPrecondition, InvalidArgument, Unavailable
from quire.shared.pb.common.v1.weights_stream_pb2 import TensorHead
from quire.shared.pb.worker.v1 import worker_pb2 as pb

# Names of safetensors.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DEFAULT_TIMEOUT_MS = 120_000
TOLERANCE_S = 0.01  # torch rounds to milliseconds


class GroupMember(Protocol):
    """This rank's membership in one group.

    Raises RuntimeError for missing broadcasts, ValueError for unexpected content, RemoteFailureError if another member
    has published a failure.
    """

    def announce(self, key: str) -> None:
        """Sets the key in the store, for a trainer that waits for it."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, timeout_s: float) -> Tensor:
        """Returns the next broadcast; valid until the one after it."""

    def interrupt(self) -> None:
        """Makes a concurrent receive() raise RuntimeError. Thread-safe."""

    def report_failure(self, error: BaseException) -> None:
        """Publishes the failure to the other members, which then stop waiting."""

    def close(self) -> None: ...


class WeightsGroups:
    """Process groups that one rank of a worker has joined, by name. Not thread-safe, except interrupt()."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        """Creates an empty set of groups; `rank` is this rank among those of the worker."""
        self._device, self._rank = device, rank
        self._groups: dict[str, WeightsGroup] = {}

    def join(self, order: pb.JoinWeightsGroup) -> None:
        """Joins a group as rank first_rank + own rank; returns when all members have joined.

        Leaves an earlier group of the same name, whose trainer has restarted. Raises InvalidArgument for NCCL without a
        GPU and Unavailable if joining fails.
        """
        self.leave(name := order.group_name)
        if order.backend == "nccl" and self._device.type != "cuda":
            text = f"backend: nccl requires GPUs, and this worker runs on {self._device.type}; use gloo"
            raise InvalidArgument(text, field="backend")
        rank = order.first_rank + self._rank
        try:
            member = NcclMember(order, rank, self._device) if order.backend == "nccl" else GlooMember(order, rank)
        except RuntimeError as error:
            where = f"{order.master_address}:{order.master_port}"
            text = f"group {name!r}: as rank {rank} of {order.world_size} at {where}: {_said(error)}"
            raise Unavailable(text) from None
        self._groups[name] = WeightsGroup(name, member)

    def find(self, name: str) -> WeightsGroup:
        """Returns the group. Raises FailedPrecondition if it was not joined."""
        if name not in self._groups:
            text = f"group_name: this worker is not in a group named {name!r}; call init_weights_update_group first"
            raise FailedPrecondition(text, field="group_name")
        return self._groups[name]

    @contextmanager
    def receiving(self, expected: pb.ExpectedBroadcast) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yields an iterator of the tensors of an update, each valid until the next one.

        A failure in the block ends the group on this rank and on all others. Raises Unavailable for missing broadcasts,
        InvalidArgument for unexpected content, and the error of another rank that failed.
        """
        name = expected.content.group_name
        group = self.find(name)
        try:
            timeout_ms = expected.content.timeout_ms or DEFAULT_TIMEOUT_MS
            yield group.tensors(expected.tensors, timeout_ms / 1000)
        except BaseException as error:
            group.member.report_failure(error)
            self.leave(name)
            raise

    def interrupt(self, name: str) -> None:
        """Makes a receive() in the group raise; the group is then left. Does nothing for unknown names. Thread-safe."""
        group = self._groups.get(name)
        if group is not None:
            group.member.interrupt()

    def leave(self, name: str) -> None:
        """Leaves the group, if it was joined."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.member.close()


class WeightsGroup:
    """One joined group, as a receiver of updates."""

    def __init__(self, name: str, member: GroupMember) -> None:
        self._name, self.member = name, member
        self._num_updates = 0

    def tensors(self, heads: Sequence[TensorHead], timeout_s: float) -> Iterator[tuple[str, Tensor]]:
        """Announces readiness, then yields the tensors in the order of `heads`; empty ones are not broadcast.

        `timeout_s`: for all of them together. Raises QuireError that names group and tensor.
        """
        deadline = time.monotonic() + timeout_s
        for number, head in enumerate(heads, 1):
            where = f"group {self._name!r}: {head.name} (tensor {number} of {len(heads)})"
            try:
                if number == 1:
                    self._say_ready()
                yield head.name, self._received(head, deadline)
            except RemoteFailureError as error:
                raise error.as_quire_error(where) from None
            except ValueError as error:
                raise InvalidArgument(f"{where}: {error}", field="shapes") from None
            except RuntimeError as error:
                is_late = time.monotonic() >= deadline - TOLERANCE_S
                what = f"was not received within {timeout_s:g} s" if is_late else f"was not received: {_said(error)}"
                raise Unavailable(f"{where} {what}") from None

    def _say_ready(self) -> None:
        """Announces readiness, so that a waiting trainer sends nothing that would be refused."""
        self.member.announce(f"{self._name}/receiving/{self._num_updates}")
        self._num_updates += 1

    def _received(self, head: TensorHead, deadline: float) -> Tensor:
        """Returns the next broadcast of this head's shape and dtype; an empty tensor without receiving."""
        dtype, shape = DTYPES[head.dtype], tuple(head.shape)
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        return self.member.receive(shape, dtype, max(deadline - time.monotonic(), 0.001))


def _said(error: Exception) -> str:
    """Returns the first line of an error that may include code addresses."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
