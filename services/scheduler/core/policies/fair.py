"""Fairness between tenants by the tokens they cost (virtual token counter, arXiv 2401.00588).

Each tenant has a counter of what it was served: uncached prompt tokens plus output tokens, divided by its weight. The
next sequence is the first of the tenant with the smallest counter, so cached prompts and short answers are cheap, and
whoever asks for much waits while others ask. Nobody saves up credit: a tenant that comes back is lifted to the smallest
counter of those that wait.

Bound: while two tenants both have sequences waiting, their counters differ by at most 2 * max(P, T) / w, where P is the
longest prompt, T the most tokens that can be in the running batch (KV blocks * block size), w the smaller weight.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np

from services.scheduler.core.policies.policy import least_work_lost
from services.scheduler.core.running import Running, Slots
from services.scheduler.core.sequence import Sequence

REMEMBERED_TENANTS = 4096  # tenants without a sequence keep their counter until there are more than this


class Tenant:
    """Its waiting sequences and its account."""

    def __init__(self, name: str, index: int, weight: float, counter: float) -> None:
        self.name = name
        self.index = index
        self.weight = weight
        self.counter = counter
        self.queue: OrderedDict[int, Sequence] = OrderedDict()


class Fair:
    """A queue for each tenant."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()  # by last arrival
        self._by_index: dict[int, Tenant] = {}
        self._next_index = 0
        self._waiting = 0
        self._last: Tenant | None = None  # whose sequence was taken last

    def counter(self, tenant: str) -> float:
        return self._tenants[tenant].counter

    def push(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence.tenant)
        if not tenant.queue:
            tenant.counter = max(tenant.counter, self._floor())
        tenant.queue[sequence.key] = sequence
        sequence.tenant_index = tenant.index
        self._waiting += 1

    def push_back(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence.tenant)
        tenant.queue[sequence.key] = sequence
        tenant.queue.move_to_end(sequence.key, last=False)
        sequence.tenant_index = tenant.index
        self._waiting += 1

    def peek(self) -> Sequence:
        return next(iter(self._next().queue.values()))

    def pop(self) -> Sequence:
        tenant = self._next()
        self._waiting -= 1
        self._last = tenant
        return tenant.queue.popitem(last=False)[1]

    def remove(self, sequence: Sequence) -> None:
        del self._tenants[sequence.tenant].queue[sequence.key]
        self._waiting -= 1

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted((s for t in self._tenants.values() for s in t.queue.values()), key=lambda s: s.order))

    def victim(self, running: Running) -> int:
        """Of the tenant that was served most, whoever loses the least work."""
        slots = np.flatnonzero(running.live)
        served = np.array([self._served(index) for index in running.tenants[slots].tolist()])
        return least_work_lost(running, slots[served == served.max()])

    def charge_prompt(self, sequence: Sequence, num_uncached_tokens: int) -> None:
        tenant = self._by_index.get(sequence.tenant_index)
        if tenant is not None:
            tenant.counter += num_uncached_tokens / tenant.weight

    def charge_output(self, running: Running, slots: Slots) -> None:
        indices, counts = np.unique(running.tenants[slots], return_counts=True)
        for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
            tenant = self._by_index.get(index)
            if tenant is not None:
                tenant.counter += count / tenant.weight

    def _served(self, index: int) -> float:
        tenant = self._by_index.get(index)
        return 0.0 if tenant is None else tenant.counter

    def _next(self) -> Tenant:
        waiting = (tenant for tenant in self._tenants.values() if tenant.queue)
        return min(waiting, key=lambda tenant: tenant.counter)

    def _floor(self) -> float:
        """What a tenant's counter is at least when it begins to wait."""
        waiting = [tenant.counter for tenant in self._tenants.values() if tenant.queue]
        if waiting:
            return min(waiting)
        return 0.0 if self._last is None else self._last.counter

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._forget_one()
            tenant = Tenant(name, self._next_index, self._weights.get(name, 1.0), self._floor())
            self._next_index += 1
            self._tenants[name] = tenant
            self._by_index[tenant.index] = tenant
        self._tenants.move_to_end(name)
        return tenant

    def _forget_one(self) -> None:
        """Names come from clients: those who have not come for longest are forgotten when there are too many."""
        if len(self._tenants) < REMEMBERED_TENANTS:
            return
        oldest = next((tenant for tenant in self._tenants.values() if not tenant.queue), None)
        if oldest is not None:
            del self._tenants[oldest.name]
            del self._by_index[oldest.index]
