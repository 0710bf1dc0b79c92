"""Fairness between tenants by the tokens they cost (virtual token counter, arXiv 2401.00588).

Each tenant has a counter of its served tokens: uncached prompt tokens plus output tokens, divided by its weight. The
next sequence is the first of the tenant with the smallest counter, so cached prompts and short answers are cheap, and a
tenant with large requests waits while other tenants have requests. No tenant saves up credit: one that returns is
lifted to the smallest counter of the tenants that wait.

The last slots are reserved for tenants with few running sequences, so that a tenant's short request need not wait until
a sequence of another tenant ends.

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

Rank = tuple[float, int, int]  # counter, arrival rank in the wait list, index of the tenant
RESERVED_PART = 16  # 1/16 of the slots is reserved, once there are several tenants
REMEMBERED_TENANTS = 4096  # idle tenants keep their counter up to this number of tenants


class TenantAccount:
    """Waiting sequences and served-token counter of one tenant."""

    def __init__(self, name: str, index: int, weight: float, counter: float) -> None:
        self.name = name
        self.index = index
        self.weight = weight
        self.counter = counter
        self.waits_since = 0  # rank in the order in which tenants started to wait
        self.ranked = False  # whether the heap has an entry of the tenant
        self.queue: OrderedDict[int, Sequence] = OrderedDict()

    @property
    def rank(self) -> Rank:
        """Sort key; the tenant with the smallest rank is next. Ranks only ever grow."""
        return self.counter, self.waits_since, self.index


class Fair:
    """One queue per tenant. A heap has one entry per waiting tenant, with a possibly outdated rank. As ranks only grow,
    the first entry that is up to date is the smallest, so the cost of a step depends on what changes and not on the
    number of waiting tenants."""

    def __init__(self, options: PolicyOptions = DEFAULTS, max_remembered: int = REMEMBERED_TENANTS) -> None:
        """`max_remembered`: tenants beyond which idle ones are forgotten."""
        self._weights, self._max_remembered = options.tenant_weights, max_remembered
        self.tenants: dict[str, TenantAccount] = {}
        # Least recently emptied queue first.
        self._idle_tenants: OrderedDict[str, TenantAccount] = OrderedDict()
        self._by_index: dict[int, TenantAccount] = {}
        self.heap: list[Rank] = []
        self._num_waits = 0
        self._next_index = 0
        self._waiting = 0
        self._last: TenantAccount | None = None  # tenant of the last sequence that was popped
        self._skipped: list[TenantAccount] = []  # tenants that wait and are passed over

    def counter(self, tenant: str) -> float:
        return self.tenants[tenant].counter

    def push(self, sequence: Sequence) -> None:
        """Appends a sequence to its tenant's queue. A tenant that starts to wait has its counter raised to at least
        the smallest one of the waiting tenants (without any, that of the tenant served last), so that idle time
        earns no credit."""
        tenant = self._tenant(sequence.tenant)
        if not tenant.queue:
            tenant.counter = max(tenant.counter, self._min_counter())
        self._enqueue(tenant, sequence)

    def push_back(self, sequence: Sequence) -> None:
        """Returns a preempted sequence to the head of its tenant's queue, without raising the tenant's counter."""
        tenant = self._tenant(sequence.tenant)
        self._enqueue(tenant, sequence)
        tenant.queue.move_to_end(sequence.key, last=False)

    def _enqueue(self, tenant: TenantAccount, sequence: Sequence) -> None:
        """Appends a sequence to the tenant's queue, gives the tenant an entry in the heap if it has none, and marks
        it as not idle."""
        if not tenant.queue:
            self._num_waits += 1
            tenant.waits_since = self._num_waits
        tenant.queue[sequence.key] = sequence
        sequence.tenant_index = tenant.index
        self._idle_tenants.pop(tenant.name, None)
        if not tenant.ranked:
            tenant.ranked = True
            heapq.heappush(self.heap, tenant.rank)
        self._waiting += 1

    def peek(self) -> Sequence:
        return next(iter(self._next().queue.values()))

    def pop(self) -> Sequence:
        """Removes and returns the first sequence of the tenant with the smallest rank; only valid while the queue is
        not empty."""
        tenant = self._next()
        self._last = tenant
        sequence = tenant.queue.popitem(last=False)[1]
        self._on_removed(tenant)
        return sequence

    def next_for(self, running: Running) -> Sequence | None:
        """Implements Policy.next_for(): takes tenants that may not have a reserved slot out of the heap until
        end_admission()."""
        while (tenant := self._first()) is not None:
            if self._may_take_slot(running, tenant):
                return next(iter(tenant.queue.values()))
            heapq.heappop(self.heap)
            self._skipped.append(tenant)
        return None

    def _may_take_slot(self, running: Running, tenant: TenantAccount) -> bool:
        """Returns whether the tenant may take a free slot: the reserved ones are divided equally between the tenants
        that run and this one."""
        reserve = running.num_slots // RESERVED_PART
        if running.num_free_slots > reserve or len(self.tenants) < 2:
            return True
        tenants = running.tenants[running.live]
        count = int(np.count_nonzero(tenants == tenant.index))
        return count < max(1, reserve // (len(np.unique(tenants)) + (not count)))

    def end_admission(self) -> None:
        """Puts the tenants that were passed over back into the heap; those that no longer wait are dropped from it
        later."""
        for tenant in self._skipped:
            heapq.heappush(self.heap, tenant.rank)
        self._skipped.clear()

    def remove(self, sequence: Sequence) -> None:
        tenant = self.tenants[sequence.tenant]
        del tenant.queue[sequence.key]
        self._on_removed(tenant)

    def _on_removed(self, tenant: TenantAccount) -> None:
        """Updates the bookkeeping after one of the tenant's sequences left the queue."""
        self._waiting -= 1
        if not tenant.queue:
            self._idle_tenants[tenant.name] = tenant

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted((s for t in self.tenants.values() for s in t.queue.values()), key=lambda s: s.order))

    def victim(self, running: Running) -> int:
        """Returns the slot that loses the least work among those of the tenant that was served most."""
        slots = np.flatnonzero(running.live)
        served = np.array([self._served(index) for index in running.tenants[slots].tolist()])
        return least_work_lost(running, slots[served == served.max()])

    def counted(self, running: Running, newcomer: Sequence) -> Mask:
        return running.live

    def charge_prompt(self, sequence: Sequence, num_uncached_tokens: int) -> None:
        """Adds the uncached prompt tokens, divided by the tenant's weight, to the tenant's counter; a tenant that
        was removed is not charged."""
        tenant = self._by_index.get(sequence.tenant_index)
        if tenant is not None:
            tenant.counter += num_uncached_tokens / tenant.weight

    def charge_output(self, running: Running, slots: Slots) -> None:
        """Adds one token for each of `slots`, divided by the tenant's weight, to the counters of their tenants;
        tenants that were removed are not charged."""
        indices, counts = np.unique(running.tenants[slots], return_counts=True)
        for index, count in zip(indices.tolist(), counts.tolist(), strict=True):
            tenant = self._by_index.get(index)
            if tenant is not None:
                tenant.counter += count / tenant.weight

    def _served(self, index: int) -> float:
        tenant = self._by_index.get(index)
        return 0.0 if tenant is None else tenant.counter

    def _next(self) -> TenantAccount:
        """Returns the tenant with the smallest rank; only valid while a tenant waits."""
        tenant = self._first()
        assert tenant is not None, "a tenant waits"
        return tenant

    def _first(self) -> TenantAccount | None:
        """Returns the waiting tenant with the smallest rank, or None. Removes outdated entries of the heap on the
        way and replaces those whose rank has grown."""
        while self.heap:
            entry = self.heap[0]
            tenant = self._by_index.get(entry[2])
            if tenant is None:
                heapq.heappop(self.heap)  # the tenant was removed
            elif not tenant.queue:
                heapq.heappop(self.heap)
                tenant.ranked = False
            elif entry == tenant.rank:
                return tenant
            else:
                heapq.heapreplace(self.heap, tenant.rank)
        return None

    def _min_counter(self) -> float:
        """Returns the lower bound of a tenant's counter when it starts to wait."""
        first = self._first()
        if first is not None:
            return first.counter
        return 0.0 if self._last is None else self._last.counter

    def _tenant(self, name: str) -> TenantAccount:
        """Returns the account of a tenant. A new account starts at the lower bound of _min_counter() and may
        displace the account of an idle tenant."""
        tenant = self.tenants.get(name)
        if tenant is None:
            self._remove_idle_tenant()
            tenant = TenantAccount(name, self._next_index, self._weights.get(name, 1.0), self._min_counter())
            self._next_index += 1
            self.tenants[name] = tenant
            self._by_index[tenant.index] = tenant
        return tenant

    def _remove_idle_tenant(self) -> None:
        """Removes the longest idle tenant if there are too many: names come from clients, so their number is not
        bounded."""
        if len(self.tenants) < self._max_remembered:
            return
        if self._idle_tenants:
            name, tenant = self._idle_tenants.popitem(last=False)
            del self.tenants[name]
            del self._by_index[tenant.index]
        if len(self.heap) > 2 * len(self.tenants):  # most entries are of removed tenants
            self.heap = [tenant.rank for tenant in self.tenants.values() if tenant.queue]
            heapq.heapify(self.heap)
            for tenant in self.tenants.values():
                tenant.ranked = bool(tenant.queue)
