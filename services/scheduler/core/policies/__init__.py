"""Scheduling policies, one per file: the order of admission and the choice of preemption victims."""

from quire.services.scheduler.core.policies.policy import DEFAULTS, Policy, PolicyMaker, PolicyOptions

__all__ = ["DEFAULTS", "Policy", "PolicyMaker", "PolicyOptions"]
