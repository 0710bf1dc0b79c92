"""Who comes in next, and who goes when blocks run out: one file a policy."""

from quire.services.scheduler.core.policies.policy import DEFAULTS, Policy, PolicyMaker, PolicyOptions

__all__ = ["DEFAULTS", "Policy", "PolicyMaker", "PolicyOptions"]
