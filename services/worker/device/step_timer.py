"""Where the time of steps goes, on the device's clock."""

from __future__ import annotations

from typing import Any

from quire.services.worker.device.device import Clock, Device, clock_of
from quire.shared.step_value import step_value

# Marks take long to set on CUDA: 10 to 18 us each on an H200's host, a tenth of what a step takes to launch.
TIMED_EVERY = 16


@step_value
class Timings:
    """Microseconds on the device's clock."""

    prepare_us: int
    forward_us: int
    sample_us: int


class StepTimer:
    """Of short steps one in some has all its marks, and stands for those behind it."""

    def __init__(self, device: Device) -> None:
        self._clock: Clock = clock_of(device)
        self._every = 1 if device.is_synchronous else TIMED_EVERY
        self._num_short = 0
        self._latest = Timings(0, 0, 0)

    def begin(self, *, short: bool) -> list[Any] | None:
        """The first mark of a step; None: only its end will be marked."""
        if short:
            self._num_short += 1
            if self._num_short % self._every:
                return None
        return [self._clock.mark()]

    def mark(self, marks: list[Any] | None) -> None:
        if marks is not None:
            marks.append(self._clock.mark())

    def end(self, marks: list[Any] | None) -> list[Any]:
        """All marks of the step, to wait for."""
        return [*(marks or ()), self._clock.mark()]

    def wait(self, marks: list[Any]) -> Timings:
        """Until the step has ended."""
        self._clock.wait(marks[-1])
        spans = self._clock.spans_us(marks)
        if spans:
            self._latest = Timings(*spans)
        return self._latest
