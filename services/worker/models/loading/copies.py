"""Tensors of a checkpoint are copied into a model's memory, on GPUs by several threads at once.

A file's pages are read (out of the page cache, or from the disk) into pinned memory and go to the GPU from there, by a
stream of each thread's own: one thread reads 3 to 6 GB/s, the link takes 50.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from shared.logs import logger

log = logger("worker.loading")

MOST_THREADS = 8
PIECE = 16 << 20  # bytes of pinned memory, of which each thread has two
MOST_WAITING = 256  # tensors that have been found and are not copied yet
SAY_EVERY_S = 2.0


class Copies:
    """Of one checkpoint. Tensors are named in the order in which they are found."""

    def __init__(self, num_threads: int) -> None:
        """0: at once, by the caller."""
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="load") if num_threads else None
        self._waiting: deque[Future[None]] = deque()
        self._own = threading.local()
        self._streams: list[torch.cuda.Stream] = []
        self._inference = torch.is_inference_mode_enabled()
        self._num_bytes, self._begun = 0, time.monotonic()
        self._said = self._begun

    def put(self, tensor: Tensor, destination: Tensor) -> None:
        """Raises what an earlier copy raised."""
        self._num_bytes += destination.nbytes
        if self._pool is None:
            destination.copy_(tensor)
        else:
            while len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft().result()
            ahead = torch.cuda.current_stream(destination.device) if destination.is_cuda else None
            self._waiting.append(self._pool.submit(self._copy, tensor, destination, ahead))
        self._say()

    def settle(self) -> None:
        """All that has been put is there. Raises what a copy raised."""
        while self._waiting:
            self._waiting.popleft().result()
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _say(self) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said, gib = now, self._num_bytes / (1 << 30)
            log.info("weights", loaded_gib=round(gib, 1), gib_per_s=round(gib / (now - self._begun), 1))

    def _copy(self, tensor: Tensor, destination: Tensor, ahead: torch.cuda.Stream | None) -> None:
        with torch.inference_mode(self._inference):
            if ahead is None:
                destination.copy_(tensor)
                return
            if not hasattr(self._own, "staging"):
                self._own.staging = Staging(destination.device)
                self._streams.append(self._own.staging.stream)
            self._own.staging.copy(tensor, destination, ahead)


class Staging:
    """A thread's."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._taken = [torch.cuda.Event(), torch.cuda.Event()]
        self._turn = 0

    def copy(self, tensor: Tensor, destination: Tensor, ahead: torch.cuda.Stream) -> None:
        """Behind what is `ahead`: kernels that may still read what was in this memory before."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(ahead)
            alike = tensor.dtype == destination.dtype and tensor.shape == destination.shape
            if not alike or not tensor.is_contiguous() or not destination.is_contiguous():
                destination.copy_(tensor)
                return
            source, target = (one.view(-1).view(torch.uint8) for one in (tensor, destination))
            for begin in range(0, source.numel(), PIECE):
                piece = source[begin : begin + PIECE]
                with self._next(piece.numel()) as pinned:
                    np.copyto(pinned.numpy(), piece.numpy())  # torch would begin threads of its own for it
                    target[begin : begin + PIECE].copy_(pinned, non_blocking=True)

    @contextmanager
    def _next(self, size: int) -> Iterator[Tensor]:
        self._turn ^= 1
        self._taken[self._turn].synchronize()
        yield self._pieces[self._turn][:size]
        self._taken[self._turn].record(self.stream)


def threads_for(device: torch.device) -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0))) if device.type == "cuda" else 0
