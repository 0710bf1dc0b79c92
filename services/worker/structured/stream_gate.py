"""Copies to a CUDA device that wait for the host without blocking the thread that launches their readers."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.shared.errors import Internal

WAIT_VALUE_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ, compares the difference in 32 bits
FAR_AHEAD = 2**30


class StreamGate:
    """Monotonic counter in pinned host memory, and a CUDA stream on which copies wait until it reaches a number."""

    def __init__(self) -> None:
        self._memory = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._number = self._memory.numpy()
        self._reached = 0
        self._is_open = False
        self._stream = torch.cuda.Stream()
        self._copied = torch.cuda.Event()

    def copy_after(self, number: int, target: Tensor, source: Tensor) -> None:
        """Copies `source` to `target` once the counter reaches `number`, concurrently to the current stream; later work
        on that stream waits for the copy."""
        status = _wait_value()(self._stream.cuda_stream, self._memory.data_ptr(), number, WAIT_VALUE_GEQ)
        if status:
            raise Internal(f"CUDA error: cuStreamWaitValue32 returned {status}")
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._copied.record()
        self._copied.wait()

    def advance_to(self, number: int) -> None:
        """Sets the counter to `number`, which releases the copies that wait for it or less; no effect once opened
        permanently."""
        self._reached = number
        if not self._is_open:
            self._number[0] = np.int32(number)
            if self._is_open:  # opened concurrently: the write above would close it for good
                self._write_far_ahead()

    def open_permanently(self) -> None:
        """Releases all waiting work, whose results are discarded. Idempotent and thread-safe: adding FAR_AHEAD twice
        would wrap around."""
        self._is_open = True
        self._write_far_ahead()

    def _write_far_ahead(self) -> None:
        """Sets the counter so far ahead that every waiting copy continues."""
        self._number[0] = np.int32(self._reached + FAR_AHEAD)


@cache
def _wait_value() -> Any:
    """Returns the driver's cuStreamWaitValue32, loaded once, with its argument types set."""
    call = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return call
