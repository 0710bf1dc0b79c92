"""Intervals and time limits of a worker's background work, none of which an operator needs to set."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.process.liveness import LOOK_S


@dataclass(frozen=True, slots=True)
class WorkerTiming:
    """Times in seconds."""

    first_backoff_s: float = 0.1  # before a worker attaches again
    liveness_check_s: float = LOOK_S
    command_s: float = 120.0  # one device command: four times the scheduler's timeout, which ends the attachment


DEFAULT_TIMING = WorkerTiming()
