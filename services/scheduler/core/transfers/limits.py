"""What lies below a worker's device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierLimits:
    """What lies below a worker's device, and how it is used."""

    num_host_blocks: int = 0
    num_disk_blocks: int = 0  # only below host memory
    policy: str = "lru"  # of eviction.POLICIES
    store_threshold: int = 0  # prompts that a block must have been in before it is stored


NO_TIERS = TierLimits()
