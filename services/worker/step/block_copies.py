"""Copy-on-write of KV blocks at the start of a step: samples of a prompt share its last block until they write to
it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.services.worker.step.plan_violation import require
from quire.shared.columns import U32


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Source and target ids of KV block copies; no target is a source, so that their order does not matter."""

    sources: U32
    targets: U32

    def check(self, num_blocks: int) -> None:
        """Raises PlanViolation for ids out of range and for copies that depend on their order."""
        sources, targets = self.sources, self.targets
        require(len(sources) == len(targets) > 0, lambda: f"copies of {len(sources)} blocks to {len(targets)}")
        both = np.concatenate((sources, targets))
        inside = bool(both.min() > 0 and both.max() < num_blocks)
        require(inside, lambda: f"copies: block ids are not all in 1..{num_blocks - 1}: {both}")
        once = len(np.unique(targets)) == len(targets) and not np.isin(targets, sources).any()
        require(once, lambda: f"copies from {sources} to {targets} depend on their order")
