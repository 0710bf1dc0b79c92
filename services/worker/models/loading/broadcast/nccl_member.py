"""Member of an NCCL group in the worker's own process: broadcasts arrive on its GPU."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from quire.services.worker.models.loading.broadcast import failures, gloo_receiver
from quire.services.worker.models.loading.broadcast.failures import RemoteFailureError
from quire.services.worker.models.loading.broadcast.gloo_receiver import LEAST_MARKED, LOOK_S, MARK_BYTES
from quire.shared.pb.worker.v1 import worker_pb2 as pb

ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class NcclMember:
    """Member of an NCCL group in this process; broadcasts arrive in GPU memory. Implements GroupMember."""

    def __init__(self, order: pb.JoinWeightsGroup, rank: int, device: torch.device) -> None:
        """Creates the member and announces it; members connect with the first broadcast. Raises RuntimeError.

        Sets TORCH_NCCL_ASYNC_ERROR_HANDLING for the time of the call, so that an exited trainer does not abort this
        process.
        """
        self._device, timeout = device, timedelta(milliseconds=order.timeout_ms)
        name, size = order.group_name, order.world_size
        self._name, self._store = name, failures.connect_store(order)
        self._others, self._is_interrupted = gloo_receiver.Failures(self._store, name), False
        self.announce(f"{name}/joining/{rank}")  # a trainer may wait for this key
        # Keys that torch.distributed uses for a group of this name on a prefixed store.
        prefixed = PrefixStore("cuda/", PrefixStore(f"{name}/", PrefixStore(name, self._store)))
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timeout
        before = os.environ.get(ERRORS)
        os.environ[ERRORS] = "0"  # read when a group is created: an exited trainer must not abort this process
        try:
            self._group: Any = distributed.ProcessGroupNCCL(prefixed, rank, size, options)
        finally:
            if before is None:
                del os.environ[ERRORS]
            else:
                os.environ[ERRORS] = before

    def announce(self, key: str) -> None:
        self._store.set(key, "1")

    def receive(self, shape: Sequence[int], dtype: torch.dtype, timeout_s: float) -> Tensor:
        """Returns the next broadcast in new GPU memory.

        Raises RuntimeError after `timeout_s` or interrupt(), RemoteFailureError for a published failure, ValueError if
        too few bytes came: a mark at the end is then still there.
        """
        content = torch.empty(math.prod(shape), dtype=dtype, device=self._device)
        end = content.view(torch.uint8)[-MARK_BYTES:]
        mark = torch.randint(256, end.shape, dtype=torch.uint8, device=self._device)
        end.copy_(mark)
        options = distributed.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=timeout_s)
        deadline = time.monotonic() + timeout_s
        work = self._group.broadcast([content], options)
        while not work.is_completed():  # NCCL's own wait aborts the process on a timeout
            if time.monotonic() >= deadline:
                raise RuntimeError(f"the broadcast did not complete within {timeout_s:g} s")
            if self._is_interrupted:
                raise RuntimeError("this worker has left the group")
            if failed := self._others.poll():
                raise RemoteFailureError(bytes.fromhex(failed))
            time.sleep(LOOK_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise RemoteFailureError(bytes.fromhex(self._others.reason_for(error))) from None
        if len(end) >= LEAST_MARKED and bool((end == mark).all()):
            raise ValueError("the trainer has sent fewer bytes than it has announced")
        return content.view(tuple(shape))

    def interrupt(self) -> None:
        self._is_interrupted = True

    def report_failure(self, error: BaseException) -> None:
        failures.publish_failure(self._store, self._name, error)

    def close(self) -> None:
        self._group.abort()
        self._group = None
