"""Recordable recorded once and launched again and again, at the price of one launch."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Recordable = Callable[[], Tensor]


class Recording(Protocol):
    """Reads and writes the same memory at every replay."""

    @property
    def result(self) -> Tensor:
        """What the work gives, until any other recording of the same recorder is replayed."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Makes recordings that are never replayed at the same time, so that they may use the same memory."""

    def record(self, first: Recordable, *others: Callable[[Tensor], Tensor]) -> list[Recording]:
        """Steps that are replayed one after the other: each but the first gets the result of the one before it."""

    def is_launch_bound(self, work: Recordable) -> bool:
        """Whether launching `work` kernel by kernel takes longer than computing it, so that a recording is faster."""


@dataclass
class _CudaRecording:
    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> None:
        self.graph.replay()


# Than launching: the device has fallen behind, and would not be idle without a recording. (9 ms of launches took 14
# where other threads had work to do, too.)
COMPUTE_BOUND_RATIO = 1.6


class CudaRecorder:
    """CUDA graphs with one pool of memory."""

    def __init__(self, least: Callable[[int], int]) -> None:
        """`least`: of the values of all ranks, which record the same."""
        self._least = least
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._has_run = False

    def record(self, first: Recordable, *others: Callable[[Tensor], Tensor]) -> list[Recording]:
        """The first steps are also run once beforehand: libraries take memory at first calls. Code that others need is
        loaded while they are recorded (62 graphs of the 8B shape in 1.0 s; 1.5 to 1.9 with a run before each)."""
        with self._side_stream():
            if not self._has_run:
                result = first()
                for step in others:
                    result = step(result)
                self._has_run = True
            with _gc_disabled():
                return self._captured(first, others)

    def is_launch_bound(self, work: Recordable) -> bool:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._side_stream():
            work()
            torch.cuda.current_stream().synchronize()
            started = time.perf_counter()
            begin.record()
            work()
            launch_ms = 1e3 * (time.perf_counter() - started)
            end.record()
            end.synchronize()
        pays = begin.elapsed_time(end) < COMPUTE_BOUND_RATIO * launch_ms
        return bool(self._least(int(pays)))  # a step is a recording on all ranks or on none

    def _captured(self, first: Recordable, others: tuple[Callable[[Tensor], Tensor], ...]) -> list[Recording]:
        graph, result = self._capture(first)
        recordings: list[Recording] = [_CudaRecording(graph, _non_owning(result))]
        for step in others:
            graph, result = self._capture(functools.partial(step, result))
            recordings.append(_CudaRecording(graph, _non_owning(result)))
        return recordings

    def _capture(self, work: Recordable) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that waits for results may ask for events meanwhile
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        result = work()
        graph.capture_end()
        return graph, result

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """A stream of its own, in order with the current one. torch.cuda.graph would also collect garbage each time."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Graphs of an earlier epoch that were freed during a capture would make it fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _DevicePointer:
    """Tells torch where an array is, but not whose: the pool may hand it to the next recording."""

    def __init__(self, tensor: Tensor) -> None:
        typestr = {torch.int16: "<i2", torch.int32: "<i4"}[tensor.dtype]
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _non_owning(tensor: Tensor) -> Tensor:
    """The same memory, dense, without keeping it: a graph's logits would otherwise cost 150 MB for each batch size."""
    words = torch.int16 if tensor.element_size() == 2 else torch.int32
    return torch.as_tensor(_DevicePointer(tensor.view(words)), device=tensor.device).view(tensor.dtype)


@dataclass
class _EagerRecording:
    work: Recordable
    found: Tensor | None = None

    @property
    def result(self) -> Tensor:
        assert self.found is not None, "not replayed yet"
        return self.found

    def replay(self) -> None:
        result = self.work()
        if self.found is None:
            self.found = torch.empty_like(result)
        self.found.copy_(result)


class EagerRecorder:
    """Does the work anew each time, on any device. For tests."""

    def record(self, first: Recordable, *others: Callable[[Tensor], Tensor]) -> list[Recording]:
        recordings = [_EagerRecording(first)]
        for step in others:
            recordings.append(_EagerRecording(functools.partial(_chained, step, recordings[-1])))
        return list(recordings)

    def is_launch_bound(self, _work: Recordable) -> bool:
        return True


def _chained(step: Callable[[Tensor], Tensor], before: _EagerRecording) -> Tensor:
    return step(before.result)
