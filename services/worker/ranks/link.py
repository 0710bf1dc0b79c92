"""What the stages of a pipeline hand each other, over gloo or NCCL.

A rank has to do with those of the other stages that have the same part of their layers."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor, distributed

from quire.services.worker.layers.stages import ReturningStates

SPARE_SENDS = 2  # kept beside those of the steps under way, which are as many as there are stages


class PeerLink:
    """Rows go to the next stage, and from the last one back to the first, in groups of two: where one direction waits,
    the other does not."""

    def __init__(self, stage: int, size: int, device: torch.device, *, onward: list[Any], back: Any) -> None:
        """`onward`: groups of this rank with its successor, by stage but the last; `back`: of the last with the first;
        where the rank is not of a group, None."""
        self._stage, self._size, self._device = stage, size, device
        self._onward, self._back = onward, back
        self._sent: deque[tuple[Any, Tensor]] = deque()  # must stay as it is until it is away
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, x: Tensor) -> None:
        self._put(x, self._onward[self._stage], 1)

    def receive(self, x: Tensor) -> None:
        work = distributed.irecv(x, group=self._onward[self._stage - 1], group_src=0)
        assert work is not None, "this rank is of the group"
        work.wait()

    def send_back(self, x: Tensor) -> None:
        self._put(x, self._back, 0)

    def expect(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> ReturningStates:
        x = torch.empty((num_rows, hidden_size), dtype=dtype, device=self._device)
        work = distributed.irecv(x, group=self._back, group_src=1)
        return _HostReceive(work, x) if self._side is None else _DeviceReceive(work, x, self._side)

    def min_over_ranks(self, value: int) -> int:
        return self._reduced(value, distributed.ReduceOp.MIN)

    def sum_over_ranks(self, value: int) -> int:
        return self._reduced(value, distributed.ReduceOp.SUM)

    def _put(self, x: Tensor, group: Any, to: int) -> None:
        x = x.contiguous()
        self._sent.append((distributed.isend(x, group=group, group_dst=to), x))
        if len(self._sent) > self._size + SPARE_SENDS:
            work, _ = self._sent.popleft()
            work.wait()

    def _reduced(self, value: int, operation: Any) -> int:
        shared = torch.tensor(value, dtype=torch.int64, device=self._device)
        distributed.all_reduce(shared, op=operation)
        return int(shared.item())


class _HostReceive:
    """gloo's."""

    def __init__(self, work: Any, x: Tensor) -> None:
        self._work, self._x = work, x
        self._waiting = threading.Lock()  # gloo lets one thread wait, once
        self._error: Exception | None = None

    def wait(self) -> None:
        with self._waiting:
            if self._work is None:
                return
            try:
                self._work.wait()
            except RuntimeError as error:
                self._error = error
            self._work = None

    def take(self) -> Tensor:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._x


class _DeviceReceive:
    """NCCL's, on a stream of its own: what is launched in the meantime does not wait for it."""

    def __init__(self, work: Any, x: Tensor, side: torch.cuda.Stream) -> None:
        self._work, self._x = work, x
        self._received = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(side):
            work.wait()
            self._received.record(side)
        x.record_stream(side)

    def wait(self) -> None:
        self._received.synchronize()

    def take(self) -> Tensor:
        current = torch.cuda.current_stream()
        current.wait_event(self._received)
        self._x.record_stream(current)
        return self._x


def open_link(rank: int, size: int, stages: int, device: torch.device) -> PeerLink:
    """All ranks make all groups, in the same order."""
    width = size // stages
    stage, lane = divmod(rank, width)
    onward: list[Any] = []
    for first in range(stages - 1):
        pairs = [distributed.new_group([first * width + other, (first + 1) * width + other]) for other in range(width)]
        onward.append(pairs[lane])
    returns = [distributed.new_group([other, (stages - 1) * width + other]) for other in range(width)]
    return PeerLink(stage, stages, device, onward=onward, back=returns[lane])
