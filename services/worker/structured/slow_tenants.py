"""Divides a step's budget for slow masks between tenants; one that repeatedly exceeds its share gets less."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

MIN_SHARE_S = 0.002  # per step: the slowest mask of usual grammars with the default library
MASKS_PER_STRIKE = 2048  # masks of a tenant after which one strike expires: some minutes of generation
MAX_TENANTS = 1024  # with strikes, the most recent ones


class SlowTenants:
    """Counts strikes by tenant: steps in which sequences of the tenant were ended because their masks took too long."""

    def __init__(self, budget_s: float, max_tenants: int = MAX_TENANTS) -> None:
        """`budget_s`: per step, for all tenants; `max_tenants`: number of tenants to remember."""
        self._max_tenants = max_tenants
        self._budget_s = budget_s
        self._strikes: OrderedDict[str, int] = OrderedDict()
        self._num_masks: Counter[str] = Counter()  # since its last strike was added or expired

    def add_strike(self, tenant: str) -> None:
        """Counts a strike of the tenant, which lowers its share; forgets the tenant with the oldest strike if there are
        too many."""
        self._strikes[tenant] = self._strikes.pop(tenant, 0) + 1
        self._num_masks[tenant] = 0
        if len(self._strikes) > self._max_tenants:
            oldest, _ = self._strikes.popitem(last=False)
            del self._num_masks[oldest]

    def count_masks(self, tenants: Iterable[str]) -> None:
        """Counts one mask for each of these tenants; a strike expires after many masks without another."""
        if not self._strikes:
            return
        for tenant in tenants:
            if tenant in self._strikes:
                self._num_masks[tenant] += 1
                if self._num_masks[tenant] == MASKS_PER_STRIKE:
                    self._drop_strike(tenant)

    def shares(self, asked_s: Mapping[str, float]) -> dict[str, float]:
        """Returns the seconds of a step that each tenant may take, given the seconds that each asks for. Tenants that
        ask for less than an equal part leave the rest to the others (max-min fairness); strikes divide a tenant's
        maximum, and every tenant gets at least MIN_SHARE_S."""
        shares: dict[str, float] = {}
        left_s = self._budget_s
        for number, tenant in enumerate(sorted(asked_s, key=lambda name: asked_s[name])):
            equal_s = left_s / (len(asked_s) - number)
            shares[tenant] = max(MIN_SHARE_S, min(equal_s, self._budget_s / (1 + self._strikes.get(tenant, 0))))
            left_s -= min(equal_s, asked_s[tenant])
        return shares

    def _drop_strike(self, tenant: str) -> None:
        """Removes one strike of the tenant, and the tenant with its last one."""
        self._num_masks[tenant] = 0
        self._strikes[tenant] -= 1
        if not self._strikes[tenant]:
            del self._strikes[tenant], self._num_masks[tenant]
