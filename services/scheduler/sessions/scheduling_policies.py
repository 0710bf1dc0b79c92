"""Table of scheduling policies; installed packages add to it with the entry point group `quire.policies`."""

from __future__ import annotations

from quire.services.scheduler.core.policies import PolicyMaker
from quire.shared import plugins
from quire.shared.errors import InvalidArgument

GROUP = "quire.policies"
POLICIES = {
    "fcfs": "quire.services.scheduler.core.policies.fcfs:Fcfs",
    "priority": "quire.services.scheduler.core.policies.priority:Priority",
    "fair": "quire.services.scheduler.core.policies.fair:Fair",
}


def find_policy(name: str) -> PolicyMaker:
    """Loads and returns the constructor of the policy with this name. Raises InvalidArgument, which lists the
    existing names, for an unknown one."""
    known = plugins.known(GROUP, POLICIES)
    if name not in known:
        text = f"scheduling_policy: {name!r} does not exist; available: {', '.join(known)}"
        raise InvalidArgument(text, field="scheduling_policy")
    policy: PolicyMaker = plugins.load(known[name])
    return policy
