"""The table of policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from services.scheduler.core.policies.fair import Fair
from services.scheduler.core.policies.fcfs import Fcfs
from services.scheduler.core.policies.policy import Policy
from services.scheduler.core.policies.priority import Priority

Weights = Mapping[str, float]

POLICIES: dict[str, Callable[[Weights, float], Policy]] = {
    "fcfs": lambda _weights, _aging_s: Fcfs(),
    "priority": lambda _weights, aging_s: Priority(aging_s),
    "fair": lambda weights, _aging_s: Fair(weights),
}


def make(name: str, tenant_weights: Weights, priority_aging_s: float = 0.0) -> Policy:
    if name not in POLICIES:
        raise KeyError(f"scheduling_policy: no policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](tenant_weights, priority_aging_s)
