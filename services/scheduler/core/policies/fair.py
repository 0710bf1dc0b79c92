"""Fairness between tenants by the tokens they cost (virtual token counter, arXiv 2401.00588).

Each tenant has a counter of what it was served: uncached prompt tokens plus output tokens, divided by its weight. The
next sequence is the first of the tenant with the smallest counter, so cached prompts and short answers are cheap, and
whoever asks for much waits while others ask. Nobody saves up credit: a tenant that comes back is lifted to the smallest
counter of those that wait.

Bound: while two tenants both have sequences waiting, their counters differ by at most 2 * max(P, T) / w, where P is the
longest prompt, T the most tokens that can be in the running batch (KV blocks * block size), w the smaller weight.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from quire.services.scheduler.core.policies.policy import DEFAULTS, PolicyOptions, least_work_lost
from quire.services.scheduler.core.running.running import Mask, Running, Slots
from quire.services.scheduler.core.sequences.sequence import Sequence

Rank = tuple[float, int, int]  # counter, when it began to wait, index of the tenant
REMEMBERED_TENANTS = 4096  # tenants without a sequence keep their counter until there are more than this


class TenantAccount:
    """Its waiting sequences and its account."""

    def __init__(self, name: str, index: int, weight: float, counter: float) -> None:
        self.name = name
        self.index = index
        self.weight = weight
        self.counter = counter
        self.waits_since = 0  # how many had begun to wait before it did, and itself
        self.ranked = False  # whether it has its entry in the heap
        self.queue: OrderedDict[int, Sequence] = OrderedDict()

    @property
    def rank(self) -> Rank:
        """Who waits with the smallest is next. Ranks only ever grow."""
        return self.counter, self.waits_since, self.index


class Fair:
    """A queue for each tenant. A heap has one entry for each tenant that waits, with its rank of some time ago; as
    ranks only grow, the first entry that is still true is the smallest: a step costs what changes, not what waits."""

    def __init__(self, options: PolicyOptions = DEFAULTS) -> None:
        self._weights = options.tenant_weights
        self.tenants: dict[str, TenantAccount] = {}
        # Whose last sequence was taken first comes first.
        self._without_queue: OrderedDict[str, TenantAccount] = OrderedDict()
        self._by_index: dict[int, TenantAccount] = {}
        self.heap: list[Rank] = []
        self._num_waits = 0
        self._next_index = 0
        self._waiting = 0
        self._last: TenantAccount | None = None  # whose sequence was taken last

    def counter(self, tenant: str) -> float:
        return self.tenants[tenant].counter

    def push(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence.tenant)
        if not tenant.queue:
            tenant.counter = max(tenant.counter, self._floor())
        self._wait(tenant, sequence)

    def push_back(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence.tenant)
        self._wait(tenant, sequence)
        tenant.queue.move_to_end(sequence.key, last=False)

    def _wait(self, tenant: TenantAccount, sequence: Sequence) -> None:
        if not tenant.queue:
            self._num_waits += 1
            tenant.waits_since = self._num_waits
        tenant.queue[sequence.key] = sequence
        sequence.tenant_index = tenant.index
        self._without_queue.pop(tenant.name, None)
        if not tenant.ranked:
            tenant.ranked = True
            heapq.heappush(self.heap, tenant.rank)
        self._waiting += 1

    def peek(self) -> Sequence:
        return next(iter(self._next().queue.values()))

    def pop(self) -> Sequence:
        tenant = self._next()
        self._last = tenant
        sequence = tenant.queue.popitem(last=False)[1]
        self._left(tenant)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        tenant = self.tenants[sequence.tenant]
        del tenant.queue[sequence.key]
        self._left(tenant)

    def _left(self, tenant: TenantAccount) -> None:
        """One of its sequences waits no longer."""
        self._waiting -= 1
        if not tenant.queue:
            self._without_queue[tenant.name] = tenant

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted((s for t in self.tenants.values() for s in t.queue.values()), key=lambda s: s.order))

    def victim(self, running: Running) -> int:
        """Of the tenant that was served most, whoever loses the least work."""
        slots = np.flatnonzero(running.live)
        served = np.array([self._served(index) for index in running.tenants[slots].tolist()])
        return least_work_lost(running, slots[served == served.max()])

    def counted(self, running: Running, newcomer: Sequence) -> Mask:
        return running.live

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

    def _next(self) -> TenantAccount:
        """The tenant with the smallest rank; only while one waits."""
        tenant = self._first()
        assert tenant is not None, "a tenant waits"
        return tenant

    def _first(self) -> TenantAccount | None:
        while self.heap:
            entry = self.heap[0]
            tenant = self._by_index.get(entry[2])
            if tenant is None:
                heapq.heappop(self.heap)  # it was forgotten
            elif not tenant.queue:
                heapq.heappop(self.heap)
                tenant.ranked = False
            elif entry == tenant.rank:
                return tenant
            else:
                heapq.heapreplace(self.heap, tenant.rank)
        return None

    def _floor(self) -> float:
        """What a tenant's counter is at least when it begins to wait."""
        first = self._first()
        if first is not None:
            return first.counter
        return 0.0 if self._last is None else self._last.counter

    def _tenant(self, name: str) -> TenantAccount:
        tenant = self.tenants.get(name)
        if tenant is None:
            self._forget_one()
            tenant = TenantAccount(name, self._next_index, self._weights.get(name, 1.0), self._floor())
            self._next_index += 1
            self.tenants[name] = tenant
            self._by_index[tenant.index] = tenant
        return tenant

    def _forget_one(self) -> None:
        """Names come from clients: of those without a queue, who has been so for longest is forgotten when there are
        too many."""
        if len(self.tenants) < REMEMBERED_TENANTS:
            return
        if self._without_queue:
            name, tenant = self._without_queue.popitem(last=False)
            del self.tenants[name]
            del self._by_index[tenant.index]
        if len(self.heap) > 2 * len(self.tenants):  # entries of those who are forgotten
            self.heap = [tenant.rank for tenant in self.tenants.values() if tenant.queue]
            heapq.heapify(self.heap)
            for tenant in self.tenants.values():
                tenant.ranked = bool(tenant.queue)
