"""Admission: how much work a frontend takes at a time, and of each tenant, before anything is computed for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Literal

from quire.services.frontend.access.rate_limit import RateLimit
from quire.shared.errors import ResourceExhausted, Unavailable
from quire.shared.metrics.frontend import FrontendMetrics

RESERVED_PART = 8  # one of so many parts of each limit is kept for tenants that hold little


class Lease:
    """A request's share of the budget: nothing until it takes some, nothing again once its `with` is left."""

    __slots__ = ("_admission", "is_partial", "num_samples", "num_tokens", "tenant")

    def __init__(self, admission: CallAdmission) -> None:
        self._admission = admission
        self.tenant = ""  # as a key says it; known before anything is taken
        self.num_samples = 0
        self.num_tokens = 0
        self.is_partial = False  # places are taken piece by piece

    def acquire(self, num_samples: int, num_tokens: int, piece: int = 0) -> None:
        """Takes so much in all, from now on, or nothing; ResourceExhausted with a hint when full, Unavailable once
        closed. `piece`: samples of one prompt, of a call that may begin with some of its prompts."""
        if piece:
            wanted, num_samples = num_samples, self._admission.num_first_prompt_samples(self, num_samples, piece)
            self.is_partial = num_samples < wanted
        samples, tokens = self._admission.charged_amount(self, num_samples, num_tokens)
        self._admission.check(self, samples, tokens)
        self._admission.add(self, samples - self.num_samples, tokens - self.num_tokens)

    def adjust_tokens(self, num_tokens: int) -> None:
        """Takes the true number of tokens, known after tokenizing; what was admitted stays admitted."""
        _, tokens = self._admission.charged_amount(self, 0, num_tokens)
        self._admission.add(self, 0, tokens - self.num_tokens)

    def start_next_prompts(self, piece: int, num_left: int) -> int:
        """Gives back the places of a prompt that has ended, and takes those of prompts that may begin instead. Returns
        how many: at most `num_left`, and at least one where no other runs."""
        return self._admission.start_next_prompts(self, piece, num_left)

    def release(self) -> None:
        self._admission.add(self, -self.num_samples, -self.num_tokens)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class TenantLimit:
    """One bounded quantity, and how much of it each tenant holds."""

    def __init__(self, name: str, most: int) -> None:
        self.name = name
        self.most = most
        self.reserve = max(1, most // RESERVED_PART) if most > 1 else 0
        self.total = 0
        self.of_tenants: Counter[str] = Counter()

    def add(self, tenant: str, amount: int) -> None:
        self.total += amount
        self.of_tenants[tenant] += amount
        if not self.of_tenants[tenant]:
            del self.of_tenants[tenant]

    @property
    def shared(self) -> int:
        return self.most - self.reserve

    def charged_amount(self, tenant: str, own: int, more: int) -> int:
        """Returns what `more` counts as. A tenant that holds nothing else is not refused for ever because others are
        always there: what does not fit counts as what is left, where that is half of all, so that one such request is
        under way at a time."""
        left = self.shared - (self.total - own)
        if more > left >= self.most // 2 and self.of_tenants[tenant] == own:
            return left
        return min(more, self.shared)

    def fits_reserve(self, tenant: str, own: int, more: int) -> bool:
        """Whether a tenant that holds little may have it; `own`: what `more` replaces."""
        if self.total - own + more > self.most:
            return False
        return self.of_tenants[tenant] - own + more <= self._of_reserve(tenant)

    def _of_reserve(self, tenant: str) -> int:
        """Returns the tenant's part of the reserve, which tenants that hold something divide."""
        return max(1, self.reserve // len(self.of_tenants.keys() | {tenant}))

    def most_of(self, tenant: str, own: int) -> int:
        """Returns how much one call may hold that is admitted piece by piece, in place of its `own`: tenants that hold
        something have equal parts then."""
        others_of_tenant = self.of_tenants[tenant] - own
        part = self.shared // len(self.of_tenants.keys() | {tenant})
        return min(part - others_of_tenant, self.shared - (self.total - own))

    def left_to(self, tenant: str) -> int:
        """Returns how much more the tenant could have now."""
        of_reserve = min(self._of_reserve(tenant) - self.of_tenants[tenant], self.most - self.total)
        return max(0, self.shared - self.total, of_reserve)


class CallAdmission:
    """A request alone always fits: else it would be refused for ever, and the hint to try again would be a lie. Where
    tenants share a frontend, one that is larger than what a single tenant may hold counts as that much."""

    def __init__(
        self,
        max_samples: int,
        max_tokens: int,
        retry_after_ms: int,
        metrics: FrontendMetrics,
        has_several_tenants: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_shared`: whether keys of several tenants are good, so that a part is kept for those that hold little."""
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
        """For a `with`; what it takes is counted here until that is left."""
        return Lease(self)

    def charged_amount(self, lease: Lease, num_samples: int, num_tokens: int) -> tuple[int, int]:
        """What a request counts as."""
        if not self._has_several_tenants():
            return num_samples, num_tokens
        samples = self._samples.charged_amount(lease.tenant, lease.num_samples, num_samples)
        return samples, self._tokens.charged_amount(lease.tenant, lease.num_tokens, num_tokens)

    def num_first_prompt_samples(self, lease: Lease, num_samples: int, piece: int) -> int:
        """Returns with how many of its samples a call of several prompts begins."""
        if not self._has_several_tenants():
            return num_samples
        most = self._samples.most_of(lease.tenant, lease.num_samples)
        return min(num_samples, max(piece, most // piece * piece))

    def start_next_prompts(self, lease: Lease, piece: int, num_left: int) -> int:
        """As Lease has it. A call keeps one place to its end."""
        running = max(0, lease.num_samples - piece)
        most = self._samples.most_of(lease.tenant, lease.num_samples)
        begun = min(num_left, max((most - running) // piece, 0 if running >= piece else 1))
        self.add(lease, max(1, running + begun * piece) - lease.num_samples, 0)
        return begun

    def check_open(self, num_arriving: int = 0, tenant: str = "") -> None:
        """Raises what the tenant's smallest request would be told; `num_arriving`: such as are about to take their
        places."""
        self._check_closed()
        present = self.num_samples + num_arriving
        if present:
            self._check(self._samples, tenant, 0, 1 + num_arriving, asked=1)
            self._check(self._tokens, tenant, 0, 1, asked=1)

    def is_full(self, num_arriving: int = 0) -> bool:
        """Whether check_open() would raise for every tenant."""
        present = self.num_samples + num_arriving
        full = present >= self._samples.most or self.num_tokens >= self._tokens.most
        return self._closed or bool(present and full)

    def check(self, lease: Lease, num_samples: int, num_tokens: int) -> None:
        """Raises if so much does not fit beside what others than `lease` hold."""
        if not lease.num_samples:
            self._check_closed()
        if self.num_samples == lease.num_samples:
            return
        self._check(self._samples, lease.tenant, lease.num_samples, num_samples)
        self._check(self._tokens, lease.tenant, lease.num_tokens, num_tokens)

    def _check_closed(self) -> None:
        if self._closed:
            raise Unavailable("this frontend is draining", retry_after_ms=self._retry_after_ms)

    def _check(self, limit: TenantLimit, tenant: str, own: int, more: int, asked: int = 0) -> None:
        """`more`: instead of `own`; `asked`: the part of it that is the request's."""
        others = limit.total - own
        if others + more > limit.most:
            present, asked = others + more - (asked or more), asked or more
            self._refuse(limit, f"{present} in flight and {asked} asked for exceed {limit.most}")
        if self._has_several_tenants() and others + more > limit.shared and not limit.fits_reserve(tenant, own, more):
            kept = f"the last {limit.reserve} of {limit.most} are kept for tenants that hold little"
            self._refuse(limit, f"{others} in flight and {asked or more} asked for are too much for one tenant: {kept}")

    def _refuse(self, limit: TenantLimit, text: str) -> None:
        self._metrics.rejections[limit.name].inc()
        raise ResourceExhausted(f"{limit.name}: {text}", retry_after_ms=self._retry_after_ms)

    def rate_limits(self, tenant: str) -> list[RateLimit]:
        """Returns what the tenant may have in flight at once, and how much more it could have now; without tenants
        that is what all clients share. Places come back as answers end: a moment after."""
        limits: list[tuple[Literal["requests", "tokens"], TenantLimit]] = [
            ("requests", self._samples),
            ("tokens", self._tokens),
        ]
        return [self._rate_limit(of, limit, tenant) for of, limit in limits]

    def _rate_limit(self, of: Literal["requests", "tokens"], limit: TenantLimit, tenant: str) -> RateLimit:
        most, left = limit.most, limit.most - limit.total
        if self._has_several_tenants():
            most, left = limit.shared, limit.left_to(tenant)
        return RateLimit(of, most, left, self._retry_after_ms / 1000 if left <= 0 else 0.0)

    def add(self, lease: Lease, num_samples: int, num_tokens: int) -> None:
        """Changes what `lease` holds and what is held in all together."""
        lease.num_samples += num_samples
        lease.num_tokens += num_tokens
        self._samples.add(lease.tenant, num_samples)
        self._tokens.add(lease.tenant, num_tokens)
        if self.num_samples:
            self._idle.clear()
        else:
            self._idle.set()

    def close(self) -> None:
        """Nothing more is admitted."""
        self._closed = True

    async def wait_idle(self) -> None:
        """Returns once nothing is in flight."""
        await self._idle.wait()
