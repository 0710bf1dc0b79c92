"""The table of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.scheduler.core.policies.fair import Fair
from services.scheduler.core.policies.fcfs import Fcfs
from services.scheduler.core.policies.policy import Policy
from services.scheduler.core.policies.priority import Priority

Weights = Mapping[str, float]

POLICIES: dict[str, Callable[[Weights], Policy]] = {
    "fcfs": lambda _weights: Fcfs(),
    "priority": lambda _weights: Priority(),
    "fair": Fair,
}


def make(name: str, tenant_weights: Weights) -> Policy:
    if name not in POLICIES:
        raise KeyError(f"scheduling_policy: no policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](tenant_weights)
