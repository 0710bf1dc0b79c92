"""Headers of a call that concern its request, in every dialect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallHeaders:
    """Headers of a call; None or empty if not sent."""

    request_id: str | None
    tenant: str
    timeout_s: float | None
    arrival_s: float  # event loop clock

    @property
    def deadline_s(self) -> float | None:
        return None if self.timeout_s is None else self.arrival_s + self.timeout_s
