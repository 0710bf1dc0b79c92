"""Timing of the phases of steps, and the clocks of devices."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import Any, Protocol

import torch

from quire.services.worker.device.device import Device
from quire.shared.step_value import step_value

# Recording a CUDA event costs 10 to 18 us on an H200's host, a tenth of the launch of a step.
TIMED_EVERY = 16
MIN_CORES_TO_SPIN = 4  # event loop, launching thread, waiting thread, and one for everything else


@step_value
class Timings:
    """Durations of a step's phases in microseconds."""

    prepare_us: int
    forward_us: int
    sample_us: int


class Clock(Protocol):
    """Records marks in the device's stream order. Differences are known once the device has passed the marks."""

    def mark(self) -> Any: ...

    def wait(self, mark: Any) -> None:
        """Blocks until the device has passed the mark."""

    def spans_us(self, marks: list[Any]) -> list[int]:
        """Returns microseconds between consecutive marks, all of which have been passed; recycles the marks."""


class HostClock:
    """Clock of devices that work synchronously."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def wait(self, mark: int) -> None:
        """No-op: a synchronous device has passed every mark."""

    def spans_us(self, marks: list[int]) -> list[int]:
        return [(end - start) // 1000 for start, end in pairwise(marks)]


class CudaClock:
    """Clock of CUDA events in the current stream."""

    def __init__(self, *, spins: bool) -> None:
        """`spins`: waiting occupies a core and returns at once; otherwise the driver wakes the thread,
        tens of µs late."""
        self._spins = spins
        self._spare: list[Any] = []  # recycled events, shared by several threads

    def mark(self) -> Any:
        """Records a recycled or new CUDA event in the current stream."""
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True, blocking=not self._spins)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def spans_us(self, marks: list[Any]) -> list[int]:
        """Returns microseconds between consecutive marks and keeps their events for reuse."""
        spans = [int(start.elapsed_time(end) * 1000) for start, end in pairwise(marks)]
        self._spare += marks
        return spans


def clock_of(device: Device) -> Clock:
    """Returns the device's clock. A thread waits only while steps run, so it may spin where cores are idle."""
    if device.is_synchronous:
        return HostClock()
    return CudaClock(spins=len(os.sched_getaffinity(0)) >= MIN_CORES_TO_SPIN)


class StepTimer:
    """Records all phases of every TIMED_EVERY-th short step; the short steps in between reuse its durations."""

    def __init__(self, device: Device) -> None:
        self._clock: Clock = clock_of(device)
        self._every = 1 if device.is_synchronous else TIMED_EVERY
        self._num_short = 0
        self._latest = Timings(0, 0, 0)

    def begin(self, *, short: bool) -> list[Any] | None:
        """Records the first mark of a step, whose marks mark() and end() extend; returns None for a short step that is
        not timed, of which only the end will be recorded."""
        if short:
            self._num_short += 1
            if self._num_short % self._every:
                return None
        return [self._clock.mark()]

    def mark(self, marks: list[Any] | None) -> None:
        """Records the end of a phase; does nothing for a step that is not timed."""
        if marks is not None:
            marks.append(self._clock.mark())

    def end(self, marks: list[Any] | None) -> list[Any]:
        """Records the last mark of the step and returns all marks for wait()."""
        return [*(marks or ()), self._clock.mark()]

    def wait(self, marks: list[Any]) -> Timings:
        """Blocks until the step has ended and returns its timings, or those of the last timed step. Callable from any
        thread."""
        self._clock.wait(marks[-1])
        spans = self._clock.spans_us(marks)
        if spans:
            self._latest = Timings(*spans)
        return self._latest
