"""Timing of the phases of steps on the device's clock."""

from __future__ import annotations

from typing import Any

from quire.services.worker.device.device import Clock, Device, clock_of
from quire.shared.step_value import step_value

# Recording a CUDA event costs 10 to 18 us on an H200's host, a tenth of the launch of a step.
TIMED_EVERY = 16


@step_value
class Timings:
    """Durations of a step's phases in microseconds."""

    prepare_us: int
    forward_us: int
    sample_us: int


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
