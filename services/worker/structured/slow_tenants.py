"""Divides a step's budget of slow masks between tenants; one that exceeds its share again and again gets less of it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

MIN_SHARE_S = 0.002  # of a step: the slowest mask of what people write for the default library takes so long
MASKS_PER_STRIKE = 2048  # of a tenant, after which one strike is forgotten: some minutes of an answer
MAX_TENANTS = 1024  # that are remembered


class SlowTenants:
    """Counts strikes: steps that ended sequences of a tenant because its masks took too long."""

    def __init__(self, budget_s: float, max_tenants: int = MAX_TENANTS) -> None:
        """`max_tenants`: those that are remembered."""
        self._max_tenants = max_tenants
        self._budget_s = budget_s
        self._strikes: OrderedDict[str, int] = OrderedDict()
        self._num_masks: Counter[str] = Counter()  # since its last strike came or went

    def add_strike(self, tenant: str) -> None:
        self._strikes[tenant] = self._strikes.pop(tenant, 0) + 1
        self._num_masks[tenant] = 0
        if len(self._strikes) > self._max_tenants:
            oldest, _ = self._strikes.popitem(last=False)
            del self._num_masks[oldest]

    def count_masks(self, tenants: Iterable[str]) -> None:
        """Counts a mask for each of these; a strike is forgotten after many without another."""
        if not self._strikes:
            return
        for tenant in tenants:
            if tenant in self._strikes:
                self._num_masks[tenant] += 1
                if self._num_masks[tenant] == MASKS_PER_STRIKE:
                    self._drop_strike(tenant)

    def shares(self, asked_s: Mapping[str, float]) -> dict[str, float]:
        """Returns the seconds of a step that each tenant may take: at least what it takes, where there is enough for
        all. Those that ask for less than an equal part leave the rest to the others (max-min fairness)."""
        shares: dict[str, float] = {}
        left_s = self._budget_s
        for number, tenant in enumerate(sorted(asked_s, key=lambda name: asked_s[name])):
            equal_s = left_s / (len(asked_s) - number)
            shares[tenant] = max(MIN_SHARE_S, min(equal_s, self._budget_s / (1 + self._strikes.get(tenant, 0))))
            left_s -= min(equal_s, asked_s[tenant])
        return shares

    def _drop_strike(self, tenant: str) -> None:
        self._num_masks[tenant] = 0
        self._strikes[tenant] -= 1
        if not self._strikes[tenant]:
            del self._strikes[tenant], self._num_masks[tenant]
