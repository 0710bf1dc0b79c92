"""Recorder of device work: records once, replays at the cost of one launch."""

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
    """Recorded work that reads and writes the same memory at every replay."""

    @property
    def result(self) -> Tensor:
        """Result of the last replay; valid until another recording of the same recorder is replayed."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Makes recordings that share memory and are never replayed concurrently."""

    def capture(self, first: Recordable, *others: Callable[[Tensor], Tensor]) -> list[Recording]:
        """Records consecutive steps; each after the first gets the result of the previous one."""

    def is_launch_bound(self, work: Recordable) -> bool:
        """Returns whether launching `work` kernel by kernel takes longer than computing it, so that a recording is
        faster."""


@dataclass
class _CudaRecording:
    """CUDA graph and the memory of its result, which the graph does not own."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> None:
        self.graph.replay()


# Computing longer than this times the launch time: the device is busy without a recording. (9 ms of launches took 14
# while other threads were running.)
COMPUTE_BOUND_RATIO = 1.6


class CudaRecorder:
    """Records CUDA graphs that share one memory pool, so that a replay overwrites the results of the others."""

    def __init__(self, least: Callable[[int], int]) -> None:
        """Takes `least`, the minimum over all ranks, which record the same graphs."""
        self._least = least
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._has_run = False

    def capture(self, first: Recordable, *others: Callable[[Tensor], Tensor]) -> list[Recording]:
        """Captures the steps as CUDA graphs, one each, on a side stream.

        The first call also runs its steps once before, because libraries allocate at first calls. Code of later ones is
        loaded while they are captured (62 graphs of the 8B shape in 1.0 s; 1.5 to 1.9 s with a run before each).
        """
        with self._side_stream():
            if not self._has_run:
                result = first()
                for step in others:
                    result = step(result)
                self._has_run = True
            with _gc_disabled():
                return self._captured(first, others)

    def is_launch_bound(self, work: Recordable) -> bool:
        """Runs `work` twice, times the second run, and returns whether a recording pays on all ranks.

        All ranks must call it together: they record the same graphs.
        """
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
        return bool(self._least(int(pays)))  # all ranks record a step or none does

    def _captured(self, first: Recordable, others: tuple[Callable[[Tensor], Tensor], ...]) -> list[Recording]:
        """Captures each step as a graph of its own, whose input is the previous step's result."""
        graph, result = self._capture(first)
        recordings: list[Recording] = [_CudaRecording(graph, _non_owning(result))]
        for step in others:
            graph, result = self._capture(functools.partial(step, result))
            recordings.append(_CudaRecording(graph, _non_owning(result)))
        return recordings

    def _capture(self, work: Recordable) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Captures `work` as a graph in the shared pool; returns the graph and its result."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that waits for results may query events meanwhile
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        result = work()
        graph.capture_end()
        return graph, result

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Switches to a side stream, ordered with the current one.

        torch.cuda.graph would also collect garbage each time.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disables garbage collection: freeing graphs of an earlier epoch during a capture would make it fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _DevicePointer:
    """Array interface of a tensor's memory without ownership: the pool may reuse it for the next recording."""

    def __init__(self, tensor: Tensor) -> None:
        typestr = {torch.int16: "<i2", torch.int32: "<i4"}[tensor.dtype]
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": typestr,
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _non_owning(tensor: Tensor) -> Tensor:
    """Returns a dense view that does not keep the memory: a graph's logits would otherwise cost 150 MB per batch
    size."""
    words = torch.int16 if tensor.element_size() == 2 else torch.int32
    return torch.as_tensor(_DevicePointer(tensor.view(words)), device=tensor.device).view(tensor.dtype)


@dataclass
class _EagerRecording:
    """Stand-in for a recording that runs `work` at each replay and copies its result to fixed memory."""

    work: Recordable
    found: Tensor | None = None

    @property
    def result(self) -> Tensor:
        assert self.found is not None, "not replayed yet"
        return self.found

    def replay(self) -> None:
        """Runs the work and copies its result into fixed memory, allocated at the first replay."""
        result = self.work()
        if self.found is None:
            self.found = torch.empty_like(result)
        self.found.copy_(result)


class EagerRecorder:
    """Runs the work anew at each replay, on any device. For tests."""

    def capture(self, first: Recordable, *others: Callable[[Tensor], Tensor]) -> list[Recording]:
        """Wraps the steps without running them; each after the first reads the previous one's last result."""
        recordings = [_EagerRecording(first)]
        for step in others:
            recordings.append(_EagerRecording(functools.partial(_chained, step, recordings[-1])))
        return list(recordings)

    def is_launch_bound(self, _work: Recordable) -> bool:
        """Returns True without running the work, so that all shapes are kept."""
        return True


def _chained(step: Callable[[Tensor], Tensor], before: _EagerRecording) -> Tensor:
    return step(before.result)
