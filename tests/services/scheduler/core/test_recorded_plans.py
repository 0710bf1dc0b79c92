"""Everything that workers are sent in recorded scenarios equals the recording, byte for byte. A change that is meant to
change plans replaces the digests and gives the reason."""

from __future__ import annotations

import pytest

from quire.services.scheduler.core.limits import NO_TIERS, TierLimits
from quire.services.scheduler.sessions.scheduling_policies import find_policy
from tests.services.scheduler.conftest import make_limits
from tests.services.scheduler.core.two_workers import operate

SIZES = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 120}
TIERS = TierLimits(16, 200)


@pytest.mark.parametrize(
    ("seed", "policy", "in_flight", "caching", "tiers", "drafts", "expected"),
    [
        (1, "fcfs", 2, False, NO_TIERS, 0, "e4f5de1e2702f3593c357d28eddcbd7d"),
        (2, "fcfs", 2, True, NO_TIERS, 0, "ead40930dbfde1c168e92ffe05d16f25"),
        (3, "priority", 1, True, TIERS, 0, "ed3b23d33c5887c785d47245a3d10dbe"),
        (4, "fair", 3, True, TIERS, 0, "164c5c2df07e22b1c3f05c371fbb8b69"),
        (5, "fcfs", 2, True, TIERS, 3, "e70a815652ec394787af4d41f409a649"),
        (6, "priority", 2, True, TIERS, 0, "371a6d4edd4f0cf3f5afb923ee78fc32"),
    ],
)
def test_plans_and_orders_equal_the_recorded_ones(
    seed: int, policy: str, in_flight: int, caching: bool, tiers: TierLimits, drafts: int, expected: str
) -> None:
    limits = make_limits(
        **SIZES,
        num_blocks=60,
        max_steps_in_flight=in_flight,
        enable_prefix_caching=caching,
        policy=find_policy(policy),
        tiers=tiers,
        num_speculative_tokens=drafts,
        fixed_draft_length=drafts > 0,
        num_query_vectors=40,
    )
    assert operate(limits, seed).sent.hexdigest()[:32] == expected
