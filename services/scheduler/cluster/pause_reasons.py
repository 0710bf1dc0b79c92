"""Reasons why workers run no steps; they run while there is none."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from quire.services.scheduler.replicas.replica import Replica


class PauseReason(enum.Enum):
    """Reason why no steps run."""

    OPERATOR = "pause"  # paused by an operator
    WEIGHTS = "weights"  # weights are being updated
    SLEEP = "sleep"  # devices have released memory


class PauseReasons:
    """Set of current pause reasons. Workers are paused with the first reason and resumed when none is left."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        """`replicas`: by id, kept up to date by the owner."""
        self._replicas = replicas
        self._reasons: set[PauseReason] = set()

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def __contains__(self, reason: PauseReason) -> bool:
        return reason in self._reasons

    def set(self, reason: PauseReason, active: bool) -> None:
        """Adds or removes a reason; pauses or resumes generation on all workers if it was the first or the last one."""
        was_paused = bool(self._reasons)
        (self._reasons.add if active else self._reasons.discard)(reason)
        if bool(self._reasons) != was_paused:
            for replica in self._replicas.values():
                replica.set_generation_paused(bool(self._reasons))
