"""Copies checkpoint tensors into a model's memory, on GPUs with several threads.

File content is read (from the page cache or the disk) into pinned memory and copied to the GPU on each thread's own
stream: one thread reads 3 to 7 GB/s, the link transfers 50. A thread takes many small tensors at a time, reads
neighbours in a file at once, and does little Python per tensor: every torch function releases the GIL, for which eight
threads compete.
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
from pathlib import Path

import torch
from torch import Tensor

from quire.services.worker.models.loading.progress import Progress
from quire.services.worker.models.loading.safetensors_layout import StoredTensor
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger

log = logger("worker.loading")

MOST_THREADS = 8
PIECE_BYTES = 32 << 20  # of a pinned buffer, two per thread; also the minimum work submitted to a thread
MOST_WAITING = 16  # submitted work items
LOG_INTERVAL_S = 2.0

Pair = tuple[Tensor | StoredTensor, Tensor]
"""Source in a file, and the destination tensor."""


class WeightCopier:
    """Copies the tensors of one checkpoint: on GPUs in batches on several threads, else at once.

    Counts loaded bytes in `progress` and logs the rate. Used by one thread; close() ends the pool.
    """

    def __init__(self, num_threads: int, progress: Progress | None = None, *, piece_bytes: int = PIECE_BYTES) -> None:
        """Creates a pool of `num_threads` threads; 0: the caller's thread copies at once. `piece_bytes`: size of a
        pinned buffer."""
        self._piece_bytes = piece_bytes
        self._progress = progress or Progress()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="load") if num_threads else None
        self._found: list[Pair] = []
        self._found_bytes = 0
        self._waiting: deque[Future[None]] = deque()
        self._thread_local = threading.local()
        self._streams: list[torch.cuda.Stream] = []
        self._files: dict[Path, int] = {}
        self._inference = torch.is_inference_mode_enabled()
        self._begun = self._said = time.monotonic()

    def can_copy(self, stored: StoredTensor, destination: Tensor) -> bool:
        """Returns whether copy_stored() supports this pair: threads, a contiguous CUDA destination, equal dtype and
        bytes."""
        alike = stored.dtype == destination.dtype and stored.num_bytes == destination.nbytes
        return self._pool is not None and alike and destination.is_cuda and destination.is_contiguous()

    def copy_stored(self, stored: StoredTensor, destination: Tensor) -> None:
        """Schedules the copy of a file's tensor that can_copy() allows; opens the file until close(). Raises errors of
        earlier copies."""
        if stored.path not in self._files:
            self._files[stored.path] = os.open(stored.path, os.O_RDONLY)
        self._put(stored, destination)

    def copy(self, tensor: Tensor, destination: Tensor) -> None:
        """Copies a tensor in memory, or schedules its copy on the threads. Raises errors of earlier copies."""
        self._put(tensor, destination)

    def wait(self) -> None:
        """Waits until all submitted tensors have arrived. Raises errors of their copies."""
        if self._pool is not None:
            self._give(self._pool)
        while self._waiting:
            self._waiting.popleft().result()
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """Cancels copies that have not started, waits for the others and closes the files; raises none of their
        errors."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        while self._files:
            os.close(self._files.popitem()[1])

    def _put(self, read: Tensor | StoredTensor, destination: Tensor) -> None:
        """Counts the tensor, then copies it at once or adds it to a batch that is submitted from the bytes of a piece
        on."""
        self._progress.loaded_bytes += destination.nbytes
        if self._pool is not None:
            self._found.append((read, destination))
            self._found_bytes += destination.nbytes
            if self._found_bytes >= self._piece_bytes:
                self._give(self._pool)
        else:
            assert isinstance(read, Tensor), "checked by can_copy()"
            destination.copy_(read)
        self._say()

    def _give(self, pool: ThreadPoolExecutor) -> None:
        """Submits the current batch to the pool; blocks while MOST_WAITING batches are unfinished and raises their
        errors."""
        found, self._found, self._found_bytes = self._found, [], 0
        if not found:
            return
        while len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft().result()
        first = found[0][1]
        producer_stream = torch.cuda.current_stream(first.device) if first.is_cuda else None
        self._waiting.append(pool.submit(self._copy, found, producer_stream))

    def _say(self) -> None:
        """Logs loaded bytes and rate, at most every LOG_INTERVAL_S."""
        now = time.monotonic()
        if now - self._said >= LOG_INTERVAL_S:
            self._said = now
            gib, of_gib = (number / (1 << 30) for number in (self._progress.loaded_bytes, self._progress.total_bytes))
            rate = round(gib / (now - self._begun), 1)
            log.info("loading weights", loaded_gib=round(gib, 1), of_gib=round(of_gib, 1), gib_per_s=rate)

    def _copy(self, pairs: Sequence[Pair], producer_stream: torch.cuda.Stream | None) -> None:
        """Copies a batch on a pool thread, which gets pinned buffers and a stream with its first batch.

        `producer_stream`: CUDA stream of the caller; None: destinations are not on a GPU.
        """
        with torch.inference_mode(self._inference):
            if producer_stream is None:
                for tensor, destination in pairs:
                    assert isinstance(tensor, Tensor), "checked by can_copy()"
                    destination.copy_(tensor)
                return
            if not hasattr(self._thread_local, "staging"):
                self._thread_local.staging = CopyStaging(producer_stream.device, self._files, self._piece_bytes)
                self._streams.append(self._thread_local.staging.stream)
            self._thread_local.staging.copy(pairs, producer_stream)


class CopyStaging:
    """Two pinned buffers and the CUDA stream of one thread: one buffer is filled while the other is copied."""

    def __init__(self, device: torch.device, files: dict[Path, int], piece_bytes: int) -> None:
        self.stream = torch.cuda.Stream(device)
        self._piece_bytes = piece_bytes
        self._pieces = [_Piece(files, _pinned(piece_bytes)) for _ in range(2)]

    def copy(self, pairs: Sequence[Pair], producer_stream: torch.cuda.Stream) -> None:
        """Copies the pairs on the thread's stream, after the work in `producer_stream`, whose kernels may still read
        the destinations.

        Tensors that need a conversion or are not contiguous are copied directly, all others through a pinned buffer.
        """
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(producer_stream)
            piece = self._next()
            for read, destination in pairs:
                if isinstance(read, Tensor) and not _lie_alike(read, destination):
                    destination.copy_(read)
                    continue
                for source, target in _parts(read, destination, self._piece_bytes):
                    if not piece.takes(source):
                        piece.send(self.stream)
                        piece = self._next()
                    piece.add(source, target)
            piece.send(self.stream)

    def _next(self) -> _Piece:
        """Switches to the other buffer and waits until its last content has been copied to the GPU."""
        self._pieces.reverse()
        self._pieces[0].taken.synchronize()
        return self._pieces[0]


@dataclass(slots=True)
class _Source:
    """Byte range in a file or in memory."""

    path: Path | None  # None: in memory
    start: int
    num_bytes: int

    def goes_on_with(self, other: _Source) -> bool:
        return self.path is not None and self.path == other.path and self.start + self.num_bytes == other.start


@dataclass(slots=True)
class _Piece:
    """Pinned buffer with the byte ranges to fill it and the destinations of its content."""

    files: dict[Path, int]
    memory: Tensor  # uint8, pinned
    taken: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    sources: list[_Source] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    num_bytes: int = 0

    def takes(self, source: _Source) -> bool:
        """Returns whether the source fits into the rest of the buffer."""
        return self.num_bytes + source.num_bytes <= self.memory.nbytes

    def add(self, source: _Source, target: Tensor) -> None:
        """Appends a source and its destination; a source that continues the last one in a file extends that read."""
        if self.sources and self.sources[-1].goes_on_with(source):
            self.sources[-1].num_bytes += source.num_bytes
        else:
            self.sources.append(source)
        self.targets.append(target)
        self.sizes.append(source.num_bytes)
        self.num_bytes += source.num_bytes

    def send(self, stream: torch.cuda.Stream) -> None:
        """Fills the buffer and starts the copies to the destinations on `stream`; empties the lists."""
        if self.targets:
            self._fill()
            parts = self.memory[: self.num_bytes].split(self.sizes)
            torch._foreach_copy_(self.targets, parts, non_blocking=True)
            self.taken.record(stream)
        self.sources, self.targets, self.sizes, self.num_bytes = [], [], [], 0

    def _fill(self) -> None:
        """Reads all sources into the pinned memory, in order."""
        at, view = 0, self.memory.numpy().data
        for source in self.sources:
            if source.path is None:
                ctypes.memmove(self.memory.data_ptr() + at, source.start, source.num_bytes)  # torch would start threads
            else:
                _read(self.files[source.path], source, view[at : at + source.num_bytes])
            at += source.num_bytes


def _read(file: int, source: _Source, memory: memoryview) -> None:
    """Fills `memory` with the source's bytes. Raises InvalidArgument if the file has become shorter."""
    done = 0
    while done < source.num_bytes:
        count = os.preadv(file, [memory[done:]], source.start + done)
        if not count:
            text = f"model: cannot read {source.path}: it ended at {source.start + done} while it was read"
            raise InvalidArgument(text, field="model")
        done += count


def _lie_alike(tensor: Tensor, destination: Tensor) -> bool:
    """Returns whether the tensor's bytes can be copied as they are: same dtype and shape, both contiguous."""
    alike = tensor.dtype == destination.dtype and tensor.shape == destination.shape
    return alike and tensor.is_contiguous() and destination.is_contiguous()


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _parts(read: Tensor | StoredTensor, destination: Tensor, piece_bytes: int) -> Iterator[tuple[_Source, Tensor]]:
    """Splits a tensor into ranges of at most `piece_bytes`, each with its destination as uint8."""
    path, start = (None, read.data_ptr()) if isinstance(read, Tensor) else (read.path, read.start)
    target = destination.view(-1).view(torch.uint8)
    if target.nbytes <= piece_bytes:
        yield _Source(path, start, target.nbytes), target
        return
    for begin in range(0, target.nbytes, piece_bytes):
        part = target[begin : begin + piece_bytes]
        yield _Source(path, start + begin, part.nbytes), part


def threads_for(device: torch.device) -> int:
    """Returns the number of copying threads: up to MOST_THREADS for a GPU, 0 for the CPU."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0))) if device.type == "cuda" else 0
