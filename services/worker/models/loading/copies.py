"""Tensors of a checkpoint are copied into a model's memory, on GPUs by several threads at once.

A file's pages are read (out of the page cache, or from the disk) into pinned memory and go to the GPU from there, by a
stream of each thread's own: one thread reads 3 to 7 GB/s, the link takes 50. Threads take many small tensors at a time,
and do little in Python for each: every function of torch lets go of the interpreter, which eight threads then ask for.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.logs import logger

log = logger("worker.loading")

MOST_THREADS = 8
PIECE = 32 << 20  # bytes of pinned memory, of which each thread has two; and what a thread is given at a time, at least
MOST_WAITING = 16  # of what threads are given
SAY_EVERY_S = 2.0

Pair = tuple[Tensor, Tensor]
"""What is read, and where it goes."""


class Copies:
    """Of one checkpoint. Tensors are named in the order in which they are found."""

    def __init__(self, num_threads: int) -> None:
        """0: at once, by the caller."""
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="load") if num_threads else None
        self._found: list[Pair] = []
        self._found_bytes = 0
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
            self._found.append((tensor, destination))
            self._found_bytes += destination.nbytes
            if self._found_bytes >= PIECE:
                self._give(self._pool)
        self._say()

    def settle(self) -> None:
        """All that has been put is there. Raises what a copy raised."""
        if self._pool is not None:
            self._give(self._pool)
        while self._waiting:
            self._waiting.popleft().result()
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _give(self, pool: ThreadPoolExecutor) -> None:
        found, self._found, self._found_bytes = self._found, [], 0
        if not found:
            return
        while len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft().result()
        first = found[0][1]
        ahead = torch.cuda.current_stream(first.device) if first.is_cuda else None
        self._waiting.append(pool.submit(self._copy, found, ahead))

    def _say(self) -> None:
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said, gib = now, self._num_bytes / (1 << 30)
            log.info("weights", loaded_gib=round(gib, 1), gib_per_s=round(gib / (now - self._begun), 1))

    def _copy(self, pairs: Sequence[Pair], ahead: torch.cuda.Stream | None) -> None:
        with torch.inference_mode(self._inference):
            if ahead is None:
                for tensor, destination in pairs:
                    destination.copy_(tensor)
                return
            if not hasattr(self._own, "staging"):
                self._own.staging = Staging(ahead.device)
                self._streams.append(self._own.staging.stream)
            self._own.staging.copy(pairs, ahead)


class Staging:
    """A thread's."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pieces = [_Piece(), _Piece()]

    def copy(self, pairs: Sequence[Pair], ahead: torch.cuda.Stream) -> None:
        """Behind what is `ahead`: kernels that may still read what was in this memory before."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(ahead)
            piece = self._next()
            for tensor, destination in pairs:
                if not _lie_alike(tensor, destination):
                    destination.copy_(tensor)
                    continue
                for address, target in _parts(tensor, destination):
                    if not piece.takes(target):
                        piece.send(self.stream)
                        piece = self._next()
                    piece.add(address, target)
            piece.send(self.stream)

    def _next(self) -> _Piece:
        self._pieces.reverse()
        self._pieces[0].taken.synchronize()
        return self._pieces[0]


@dataclass(slots=True)
class _Piece:
    """Pinned memory, and where what has been put there goes."""

    memory: Tensor = field(default_factory=lambda: torch.empty(PIECE, dtype=torch.uint8, pin_memory=True))
    taken: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    targets: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0

    def takes(self, target: Tensor) -> bool:
        return self.num_bytes + target.nbytes <= self.memory.nbytes

    def add(self, address: int, target: Tensor) -> None:
        ctypes.memmove(self.memory.data_ptr() + self.num_bytes, address, target.nbytes)  # torch would begin threads
        self.targets.append(target)
        self.num_bytes += target.nbytes

    def send(self, stream: torch.cuda.Stream) -> None:
        if self.targets:
            sources = self.memory[: self.num_bytes].split([target.nbytes for target in self.targets])
            torch._foreach_copy_(self.targets, sources, non_blocking=True)
            self.taken.record(stream)
        self.targets, self.num_bytes = [], 0


def _lie_alike(tensor: Tensor, destination: Tensor) -> bool:
    alike = tensor.dtype == destination.dtype and tensor.shape == destination.shape
    return alike and tensor.is_contiguous() and destination.is_contiguous()


def _parts(tensor: Tensor, destination: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Addresses, and uint8 [at most PIECE] of where what lies there goes."""
    target, address = destination.view(-1).view(torch.uint8), tensor.data_ptr()
    if target.nbytes <= PIECE:
        yield address, target
        return
    for begin in range(0, target.nbytes, PIECE):
        yield address + begin, target[begin : begin + PIECE]


def threads_for(device: torch.device) -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0))) if device.type == "cuda" else 0
