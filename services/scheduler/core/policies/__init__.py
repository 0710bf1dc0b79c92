"""Who comes in next, and who goes when blocks run out: one file a policy."""

from services.scheduler.core.policies.policy import Policy
from services.scheduler.core.policies.registry import POLICIES, make

__all__ = ["POLICIES", "Policy", "make"]
