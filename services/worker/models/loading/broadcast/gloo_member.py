"""Member of a gloo group in a child process (gloo_receiver.py), and the tensors it received.

gloo aborts its process when more bytes arrive than expected: a trainer that omits a tensor would abort the worker. A
child process can also be killed while it waits.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.services.worker.models.loading.broadcast import failures, gloo_receiver
from quire.services.worker.models.loading.broadcast.failures import RemoteFailureError
from quire.shared.pb.worker.v1 import worker_pb2 as pb

# For a child that imports torch on a possibly busy machine; its own timeouts are shorter.
PATIENCE_S = 60.0


class GlooMember:
    """Member of a gloo group that runs in a child process and shares the received bytes by a memory file.

    Implements GroupMember.
    """

    def __init__(self, order: pb.JoinWeightsGroup, rank: int) -> None:
        """Starts the child, which joins the group; returns when all members have joined. Raises RuntimeError after
        ending the child."""
        self._memory = os.memfd_create("quire-weights", os.MFD_CLOEXEC)
        self._process = subprocess.Popen(
            [sys.executable, "-P", gloo_receiver.__file__, str(self._memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._memory,),
        )
        timeout_s = order.timeout_ms / 1000
        try:
            self._ask(
                timeout_s + PATIENCE_S,
                host=order.master_address,
                port=order.master_port,
                rank=rank,
                size=order.world_size,
                name=order.group_name,
                timeout_s=timeout_s,
                gone=failures.encoded(failures.GONE).hex(),
            )
            self._name, self._store = order.group_name, failures.connect_store(order)
        except BaseException:
            self.close()
            raise

    def announce(self, key: str) -> None:
        self._ask(PATIENCE_S, key=key)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, timeout_s: float) -> Tensor:
        """Returns the next broadcast as a view of memory shared with the child; valid until the one after it.

        The memory grows to the largest tensor. Raises as GroupMember says.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if os.fstat(self._memory).st_size < num_bytes:  # never shrinks: earlier tensors may still be in use
            os.ftruncate(self._memory, num_bytes)
        self._ask(timeout_s + PATIENCE_S, num_bytes=num_bytes, timeout_s=timeout_s)
        content = mmap.mmap(self._memory, num_bytes)
        return torch.frombuffer(content, dtype=dtype).view(tuple(shape))

    def interrupt(self) -> None:
        self._process.kill()

    def report_failure(self, error: BaseException) -> None:
        failures.publish_failure(self._store, self._name, error)

    def close(self) -> None:
        """Kills the child, waits for its exit and closes the shared memory."""
        self._process.kill()
        self._process.communicate()
        os.close(self._memory)

    def _ask(self, patience_s: float, **question: Any) -> None:
        """Sends a request to the child and waits for its response.

        Raises RuntimeError, ValueError or RemoteFailureError as the child reports.
        """
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        try:
            pipe.write(json.dumps(question).encode() + b"\n")
            pipe.flush()
        except OSError:
            raise self._ended() from None
        deadline, received = time.monotonic() + patience_s, b""
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([answers], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise RuntimeError(f"no answer within {patience_s:g} s")
            if not (part := os.read(answers.fileno(), 1 << 16)):
                raise self._ended()
            received += part
        answer = json.loads(received)
        if "wrong" in answer:
            raise ValueError(answer["wrong"])
        if "failed" in answer:
            raise RemoteFailureError(bytes.fromhex(answer["failed"]))
        if "error" in answer:
            raise RuntimeError(answer["error"])

    def _ended(self) -> Exception:
        """Waits for the child's exit and returns its reason: ValueError if gloo aborted because of too many bytes, else
        RuntimeError."""
        if self._process.wait() == gloo_receiver.ABORTED:
            return ValueError("the trainer has sent more bytes than it has announced")
        return RuntimeError(f"its process has ended with status {self._process.returncode}")
