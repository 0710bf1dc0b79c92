"""Whether workers run steps: they do while there is no reason not to."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from quire.services.scheduler.replicas.replica import Replica


class Hold(enum.Enum):
    """Why no steps are run."""

    PAUSE = "pause"  # operators want it
    WEIGHTS = "weights"  # others are put in their place
    SLEEP = "sleep"  # devices have given memory back


class Holds:
    """The reasons that there are. Workers are told of the first one, and when none is left."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        """`replicas`: by id, kept up to date by the owner."""
        self._replicas = replicas
        self._reasons: set[Hold] = set()

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def __contains__(self, reason: Hold) -> bool:
        return reason in self._reasons

    def set(self, reason: Hold, held: bool) -> None:
        before = bool(self._reasons)
        (self._reasons.add if held else self._reasons.discard)(reason)
        if bool(self._reasons) != before:
            for replica in self._replicas.values():
                replica.hold(bool(self._reasons))
