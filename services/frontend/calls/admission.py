"""Admission control: how much work a frontend accepts at a time, overall and per tenant, before computing anything."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Literal

from quire.services.frontend.access.rate_limit import RateLimit
from quire.shared.errors import ResourceExhausted, Unavailable
from quire.shared.metrics.frontend import FrontendMetrics

RESERVED_PART = 8  # 1/8 of each limit is reserved for tenants with little in flight


class Lease:
    """A call's share of the admission budget: empty at first, released when its `with` is left."""

    __slots__ = ("_admission", "is_partial", "num_samples", "num_tokens", "tenant")

    def __init__(self, admission: CallAdmission) -> None:
        self._admission = admission
        self.tenant = ""  # by the API key; set before the first acquire()
        self.num_samples = 0
        self.num_tokens = 0
        self.is_partial = False  # only some prompts are admitted; others start as those end

    def acquire(self, num_samples: int, num_tokens: int, piece: int = 0) -> None:
        """Replaces the lease's share by this many samples and tokens. Raises ResourceExhausted with a retry hint when
        full, Unavailable once closed; the share is unchanged then. `piece`: samples per prompt, for a call that may
        start with some of its prompts."""
        if piece:
            requested, num_samples = num_samples, self._admission.num_first_prompt_samples(self, num_samples, piece)
            self.is_partial = num_samples < requested
        samples, tokens = self._admission.charged_amount(self, num_samples, num_tokens)
        self._admission.check(self, samples, tokens)
        self._admission.add(self, samples - self.num_samples, tokens - self.num_tokens)

    def adjust_tokens(self, num_tokens: int) -> None:
        """Sets the exact number of tokens, known after tokenizing; never refused, since the call is already
        admitted."""
        _, tokens = self._admission.charged_amount(self, 0, num_tokens)
        self._admission.add(self, 0, tokens - self.num_tokens)

    def start_next_prompts(self, piece: int, num_left: int) -> int:
        """Releases the share of a prompt that has ended and acquires those of prompts that may start instead. Returns
        their number: at most `num_left`, and at least one if no other runs."""
        return self._admission.start_next_prompts(self, piece, num_left)

    def release(self) -> None:
        self._admission.add(self, -self.num_samples, -self.num_tokens)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class TenantLimit:
    """A bounded quantity, counted per tenant, with a reserve for tenants with little in flight."""

    def __init__(self, name: str, limit: int) -> None:
        self.name = name
        self.limit = limit
        self.reserve = max(1, limit // RESERVED_PART) if limit > 1 else 0
        self.total = 0
        self.of_tenants: Counter[str] = Counter()

    def add(self, tenant: str, amount: int) -> None:
        """Adds `amount`, negative to release, to the tenant's share and to the total."""
        self.total += amount
        self.of_tenants[tenant] += amount
        if not self.of_tenants[tenant]:
            del self.of_tenants[tenant]

    @property
    def shared(self) -> int:
        return self.limit - self.reserve

    def charged_amount(self, tenant: str, own: int, more: int) -> int:
        """Returns the amount that `more`, in place of the call's `own`, is charged as: at most the part that tenants
        share. A request larger than the free part is charged as that part if it is at least half of the limit and the
        tenant holds nothing else: otherwise it would never be admitted while other tenants are active."""
        left = self.shared - (self.total - own)
        if more > left >= self.limit // 2 and self.of_tenants[tenant] == own:
            return left
        return min(more, self.shared)

    def fits_reserve(self, tenant: str, own: int, more: int) -> bool:
        """Whether the tenant may use the reserve for `more`, which replaces `own`."""
        if self.total - own + more > self.limit:
            return False
        return self.of_tenants[tenant] - own + more <= self._reserve_share(tenant)

    def _reserve_share(self, tenant: str) -> int:
        """Returns the tenant's share of the reserve, which active tenants divide equally."""
        return max(1, self.reserve // len(self.of_tenants.keys() | {tenant}))

    def max_for_call(self, tenant: str, own: int) -> int:
        """Returns how much a call that starts prompt by prompt may hold in place of its `own`: active tenants get equal
        shares."""
        others_of_tenant = self.of_tenants[tenant] - own
        part = self.shared // len(self.of_tenants.keys() | {tenant})
        return min(part - others_of_tenant, self.shared - (self.total - own))

    def remaining_for(self, tenant: str) -> int:
        """Returns how much more the tenant could acquire now."""
        from_reserve = min(self._reserve_share(tenant) - self.of_tenants[tenant], self.limit - self.total)
        return max(0, self.shared - self.total, from_reserve)


class CallAdmission:
    """Admits calls within limits on samples and tokens. A single call always fits an idle frontend, else its retry hint
    would be wrong. With several tenants, a call larger than one tenant's maximum is charged as that maximum."""

    def __init__(
        self,
        max_samples: int,
        max_tokens: int,
        retry_after_ms: int,
        metrics: FrontendMetrics,
        has_several_tenants: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts empty. `has_several_tenants`: whether API keys of several tenants exist, so that a reserve is kept."""
        self._samples = TenantLimit("max_inflight_requests", max_samples)
        self._tokens = TenantLimit("max_queued_tokens", max_tokens)
        self._retry_after_ms = retry_after_ms
        self._metrics = metrics
        self._has_several_tenants = has_several_tenants
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        metrics.inflight_requests.set_function(lambda: self.num_samples)
        metrics.queued_tokens.set_function(lambda: self.num_tokens)

    @property
    def num_samples(self) -> int:
        return self._samples.total

    @property
    def num_tokens(self) -> int:
        return self._tokens.total

    def lease(self) -> Lease:
        """Returns an empty lease for use in a `with`."""
        return Lease(self)

    def charged_amount(self, lease: Lease, num_samples: int, num_tokens: int) -> tuple[int, int]:
        """Returns the samples and tokens that a request is charged as: with several tenants, at most one tenant's
        maximum."""
        if not self._has_several_tenants():
            return num_samples, num_tokens
        samples = self._samples.charged_amount(lease.tenant, lease.num_samples, num_samples)
        return samples, self._tokens.charged_amount(lease.tenant, lease.num_tokens, num_tokens)

    def num_first_prompt_samples(self, lease: Lease, num_samples: int, piece: int) -> int:
        """Returns how many of its samples a call with several prompts starts with: all of them without several tenants,
        else a multiple of `piece`, at least one prompt's."""
        if not self._has_several_tenants():
            return num_samples
        most = self._samples.max_for_call(lease.tenant, lease.num_samples)
        return min(num_samples, max(piece, most // piece * piece))

    def start_next_prompts(self, lease: Lease, piece: int, num_left: int) -> int:
        """Implements Lease.start_next_prompts(). A call keeps at least one sample until its end."""
        running = max(0, lease.num_samples - piece)
        most = self._samples.max_for_call(lease.tenant, lease.num_samples)
        begun = min(num_left, max((most - running) // piece, 0 if running >= piece else 1))
        self.add(lease, max(1, running + begun * piece) - lease.num_samples, 0)
        return begun

    def check_open(self, num_arriving: int = 0, tenant: str = "") -> None:
        """Raises the error that the tenant's smallest request would get. `num_arriving`: requests that were let through
        and will acquire soon."""
        self._check_closed()
        present = self.num_samples + num_arriving
        if present:
            self._check(self._samples, tenant, 0, 1 + num_arriving, asked=1)
            self._check(self._tokens, tenant, 0, 1, asked=1)

    def is_full(self, num_arriving: int = 0) -> bool:
        """Whether check_open() would raise for every tenant. `num_arriving`: requests that were let through and will
        acquire soon."""
        present = self.num_samples + num_arriving
        full = present >= self._samples.limit or self.num_tokens >= self._tokens.limit
        return self._closed or bool(present and full)

    def check(self, lease: Lease, num_samples: int, num_tokens: int) -> None:
        """Raises ResourceExhausted if the amounts do not fit together with what other leases hold, Unavailable after
        close()."""
        if not lease.num_samples:
            self._check_closed()
        if self.num_samples == lease.num_samples:
            return
        self._check(self._samples, lease.tenant, lease.num_samples, num_samples)
        self._check(self._tokens, lease.tenant, lease.num_tokens, num_tokens)

    def _check_closed(self) -> None:
        if self._closed:
            raise Unavailable(
                "this frontend is draining; send the request again, to another frontend",
                retry_after_ms=self._retry_after_ms,
            )

    def _check(self, limit: TenantLimit, tenant: str, own: int, more: int, asked: int = 0) -> None:
        """Checks one limit and, with several tenants, its reserve. `more`: replaces `own`; `asked`: the part of it that
        the request itself asks for. Raises ResourceExhausted if either is exceeded."""
        others = limit.total - own
        if others + more > limit.limit:
            present, asked = others + more - (asked or more), asked or more
            self._refuse(
                limit, f"{present} in flight and {asked} requested exceed the limit of {limit.limit}; retry later"
            )
        if self._has_several_tenants() and others + more > limit.shared and not limit.fits_reserve(tenant, own, more):
            kept = f"the last {limit.reserve} of {limit.limit} are reserved for tenants with few requests in flight"
            self._refuse(limit, f"{others} in flight and {asked or more} requested exceed one tenant's share: {kept}")

    def _refuse(self, limit: TenantLimit, text: str) -> None:
        """Counts a rejection by this limit and raises ResourceExhausted with the retry hint."""
        self._metrics.rejections[limit.name].inc()
        raise ResourceExhausted(f"{limit.name}: {text}", retry_after_ms=self._retry_after_ms)

    def rate_limits(self, tenant: str) -> list[RateLimit]:
        """Returns the tenant's limits on work in flight and what is left of them; without tenants, those of all
        clients."""
        limits: list[tuple[Literal["requests", "tokens"], TenantLimit]] = [
            ("requests", self._samples),
            ("tokens", self._tokens),
        ]
        return [self._rate_limit(of, limit, tenant) for of, limit in limits]

    def _rate_limit(self, of: Literal["requests", "tokens"], limit: TenantLimit, tenant: str) -> RateLimit:
        """Returns one limit with its rest: the tenant's own if keys of several tenants exist, else the frontend's."""
        maximum, left = limit.limit, limit.limit - limit.total
        if self._has_several_tenants():
            maximum, left = limit.shared, limit.remaining_for(tenant)
        return RateLimit(of, maximum, left, self._retry_after_ms / 1000 if left <= 0 else 0.0)

    def add(self, lease: Lease, num_samples: int, num_tokens: int) -> None:
        """Adds the amounts, negative to release, to the lease and the totals, and wakes wait_idle() at 0."""
        lease.num_samples += num_samples
        lease.num_tokens += num_tokens
        self._samples.add(lease.tenant, num_samples)
        self._tokens.add(lease.tenant, num_tokens)
        if self.num_samples:
            self._idle.clear()
        else:
            self._idle.set()

    def close(self) -> None:
        """Refuses everything from now on."""
        self._closed = True

    async def wait_idle(self) -> None:
        """Waits until nothing is in flight."""
        await self._idle.wait()
