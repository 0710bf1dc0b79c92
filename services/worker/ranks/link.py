"""Point-to-point transfers between the stages of a pipeline, over gloo or NCCL.

A rank communicates with the ranks of other stages that have the same shard of their layers."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor, distributed

from quire.services.worker.layers.stages import ReturningStates

SPARE_SENDS = 2  # sends kept alive in addition to those of the steps in flight, one per stage


class PeerLink:
    """Sends rows to the next stage, and from the last one back to the first. Each pair has a process group, so that one
    direction does not block the other."""

    def __init__(self, stage: int, size: int, device: torch.device, *, onward: list[Any], back: Any) -> None:
        """`onward`: groups of this rank and its successor, by stage except the last; `back`: group of the last and
        first stage; None where the rank is not a member."""
        self._stage, self._size, self._device = stage, size, device
        self._onward, self._back = onward, back
        self._sent: deque[tuple[Any, Tensor]] = deque()  # tensors must not change until they are sent
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, x: Tensor) -> None:
        """Starts sending rows to the next stage; `x` is kept alive until they are sent."""
        self._put(x, self._onward[self._stage], 1)

    def receive(self, x: Tensor) -> None:
        """Receives rows into `x` from the previous stage; on CUDA later work of the current stream waits for them."""
        work = distributed.irecv(x, group=self._onward[self._stage - 1], group_src=0)
        assert work is not None, "this rank is in the group"
        work.wait()

    def send_back(self, x: Tensor) -> None:
        """Starts sending rows from the last stage to the first; `x` is kept alive until they are sent."""
        self._put(x, self._back, 0)

    def expect(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> ReturningStates:
        """Starts receiving the last stage's rows, [num_rows, hidden_size], at the first stage; the result is waited for
        or taken later."""
        x = torch.empty((num_rows, hidden_size), dtype=dtype, device=self._device)
        work = distributed.irecv(x, group=self._back, group_src=1)
        return _HostReceive(work, x) if self._side is None else _DeviceReceive(work, x, self._side)

    def min_over_ranks(self, value: int) -> int:
        return self._reduced(value, distributed.ReduceOp.MIN)

    def sum_over_ranks(self, value: int) -> int:
        return self._reduced(value, distributed.ReduceOp.SUM)

    def _put(self, x: Tensor, group: Any, to: int) -> None:
        """Starts sending `x` to the member `to` of `group` and keeps it alive; waits for the oldest send if too many
        are unfinished."""
        x = x.contiguous()
        self._sent.append((distributed.isend(x, group=group, group_dst=to), x))
        if len(self._sent) > self._size + SPARE_SENDS:
            work, _ = self._sent.popleft()
            work.wait()

    def _reduced(self, value: int, operation: Any) -> int:
        """Reduces an integer over all ranks of the replica; waits for the device."""
        shared = torch.tensor(value, dtype=torch.int64, device=self._device)
        distributed.all_reduce(shared, op=operation)
        return int(shared.item())


class _HostReceive:
    """Receive of rows over gloo, into memory that take() returns."""

    def __init__(self, work: Any, x: Tensor) -> None:
        self._work, self._x = work, x
        self._waiting = threading.Lock()  # gloo allows one thread to wait, once
        self._error: Exception | None = None

    def wait(self) -> None:
        """Blocks until the rows have arrived; stores an error for take(). Callable from any thread, repeatedly."""
        with self._waiting:
            if self._work is None:
                return
            try:
                self._work.wait()
            except RuntimeError as error:
                self._error = error
            self._work = None

    def take(self) -> Tensor:
        """Returns the received rows after waiting for them. Raises RuntimeError if the receive failed."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._x


class _DeviceReceive:
    """A receive over NCCL on a separate stream, so that work launched meanwhile does not wait for it."""

    def __init__(self, work: Any, x: Tensor, side: torch.cuda.Stream) -> None:
        self._work, self._x = work, x
        self._received = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(side):
            work.wait()
            self._received.record(side)
        x.record_stream(side)

    def wait(self) -> None:
        """Blocks until the rows have arrived on the device. Callable from any thread."""
        self._received.synchronize()

    def take(self) -> Tensor:
        """Returns the rows and makes the current stream wait for their arrival; does not block the host."""
        current = torch.cuda.current_stream()
        current.wait_event(self._received)
        self._x.record_stream(current)
        return self._x


def open_link(rank: int, size: int, stages: int, device: torch.device) -> PeerLink:
    """Creates all groups in the same order on every rank; returns this rank's link."""
    width = size // stages
    stage, lane = divmod(rank, width)
    onward: list[Any] = []
    for first in range(stages - 1):
        pairs = [distributed.new_group([first * width + other, (first + 1) * width + other]) for other in range(width)]
        onward.append(pairs[lane])
    returns = [distributed.new_group([other, (stages - 1) * width + other]) for other in range(width)]
    return PeerLink(stage, stages, device, onward=onward, back=returns[lane])
