"""Whether workers run steps: they do while there is no reason not to."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from quire.services.scheduler.replicas.replica import Replica


class PauseReason(enum.Enum):
    """Why no steps are run."""

    OPERATOR = "pause"  # operators want it
    WEIGHTS = "weights"  # others are put in their place
    SLEEP = "sleep"  # devices have given memory back


class PauseReasons:
    """The reasons that there are. Workers are told of the first one, and when none is left."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        """`replicas`: by id, kept up to date by the owner."""
        self._replicas = replicas
        self._reasons: set[PauseReason] = set()

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def __contains__(self, reason: PauseReason) -> bool:
        return reason in self._reasons

    def set(self, reason: PauseReason, held: bool) -> None:
        before = bool(self._reasons)
        (self._reasons.add if held else self._reasons.discard)(reason)
        if bool(self._reasons) != before:
            for replica in self._replicas.values():
                replica.set_generation_paused(bool(self._reasons))
