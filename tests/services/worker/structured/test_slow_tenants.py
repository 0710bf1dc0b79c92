"""Division of a step's budget for slow masks between tenants."""

from __future__ import annotations

import random

import pytest

from quire.services.worker.structured.slow_tenants import MASKS_PER_STRIKE, MAX_TENANTS, MIN_SHARE_S, SlowTenants


def test_one_tenant_alone_has_the_whole_budget() -> None:
    assert SlowTenants(0.01).shares({"a": 0.5}) == {"a": 0.01}


def test_unused_shares_go_to_other_tenants() -> None:
    shares = SlowTenants(0.012).shares({"large": 0.1, "small": 0.003, "middle": 0.02})
    assert shares["small"] >= 0.003
    assert shares["large"] == pytest.approx(0.0045)
    assert shares["middle"] == pytest.approx(0.0045)


def test_shares_add_up_to_the_budget() -> None:
    chance = random.Random(3)
    for _ in range(1000):
        asked = {str(number): chance.uniform(0, 0.05) for number in range(chance.randrange(1, 5))}
        shares = SlowTenants(0.01).shares(asked)
        granted = sum(min(asked[tenant], shares[tenant]) for tenant in asked)
        assert granted <= 0.01 + 1e-9
        if sum(asked.values()) <= 0.01:
            assert all(shares[tenant] >= asked[tenant] - 1e-9 for tenant in asked)


def test_strikes_reduce_a_share_down_to_a_minimum() -> None:
    tenants, shares = SlowTenants(0.01), []
    for _ in range(8):
        shares.append(tenants.shares({"a": 1.0, "b": 0.0})["a"])
        tenants.add_strike("a")
    assert shares[:3] == pytest.approx([0.01, 0.005, 0.01 / 3])
    assert shares[-1] == MIN_SHARE_S
    assert tenants.shares({"b": 1.0}) == {"b": 0.01}


def test_strikes_expire_after_many_masks() -> None:
    tenants = SlowTenants(0.01)
    tenants.add_strike("a")
    for _ in range(MASKS_PER_STRIKE - 1):
        tenants.count_masks(["a", "b"])
    assert tenants.shares({"a": 1.0}) == {"a": 0.005}
    tenants.count_masks(["a"])
    assert tenants.shares({"a": 1.0}) == {"a": 0.01}


def test_the_number_of_remembered_tenants_is_limited() -> None:
    tenants = SlowTenants(0.01, max_tenants=2)
    for name in ("a", "b", "a", "c"):
        tenants.add_strike(name)
    tenants.count_masks(["a", "b", "c"])
    assert tenants.shares({"b": 1.0}) == {"b": 0.01}
    assert tenants.shares({"a": 1.0})["a"] == pytest.approx(0.01 / 3)
    assert MAX_TENANTS > 2
