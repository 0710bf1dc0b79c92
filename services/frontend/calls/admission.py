"""The door: how much work a frontend takes at a time, decided before anything is computed for it."""

from __future__ import annotations

import asyncio
from typing import Literal

from services.frontend.access.rate_limit import RateLimit
from shared.errors import ResourceExhausted, Unavailable
from shared.metrics.frontend import FrontendMetrics


class Lease:
    """A request's share of the budget: nothing until it takes some, nothing again once its `with` is left."""

    __slots__ = ("_admission", "num_samples", "num_tokens")

    def __init__(self, admission: CallAdmission) -> None:
        self._admission = admission
        self.num_samples = 0
        self.num_tokens = 0

    def take(self, num_samples: int, num_tokens: int) -> None:
        """So much in all, from now on: all or nothing; ResourceExhausted with a hint when full, Unavailable once
        closed."""
        self._admission.check(self, num_samples, num_tokens)
        self._admission.add(self, num_samples - self.num_samples, num_tokens - self.num_tokens)

    def settle(self, num_tokens: int) -> None:
        """The true number of tokens, known after tokenizing; what was admitted stays admitted."""
        self._admission.add(self, 0, num_tokens - self.num_tokens)

    def release(self) -> None:
        self._admission.add(self, -self.num_samples, -self.num_tokens)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class CallAdmission:
    """A request alone always fits: else it would be refused for ever, and the hint to try again would be a lie."""

    def __init__(self, max_samples: int, max_tokens: int, retry_after_ms: int, metrics: FrontendMetrics) -> None:
        self._max_samples = max_samples
        self._max_tokens = max_tokens
        self._retry_after_ms = retry_after_ms
        self._metrics = metrics
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self.num_samples = 0
        self.num_tokens = 0
        metrics.inflight_requests.set_function(lambda: self.num_samples)
        metrics.queued_tokens.set_function(lambda: self.num_tokens)

    def lease(self) -> Lease:
        """For a `with`; what it takes is counted here until that is left."""
        return Lease(self)

    def check_open(self, num_arriving: int = 0) -> None:
        """Raises what the smallest request would be told; `num_arriving`: such as are about to take their places."""
        self._check_closed()
        present = self.num_samples + num_arriving
        if present:
            self._check("max_inflight_requests", self._max_samples, present, 1)
            self._check("max_queued_tokens", self._max_tokens, self.num_tokens, 1)

    def is_full(self, num_arriving: int = 0) -> bool:
        """Whether check_open() would raise."""
        present = self.num_samples + num_arriving
        return self._closed or bool(present and (present >= self._max_samples or self.num_tokens >= self._max_tokens))

    def check(self, lease: Lease, num_samples: int, num_tokens: int) -> None:
        """Raises if so much does not fit beside what others than `lease` hold."""
        if not lease.num_samples:
            self._check_closed()
        others = self.num_samples - lease.num_samples
        if not others:
            return
        self._check("max_inflight_requests", self._max_samples, others, num_samples)
        self._check("max_queued_tokens", self._max_tokens, self.num_tokens - lease.num_tokens, num_tokens)

    def _check_closed(self) -> None:
        if self._closed:
            raise Unavailable("this frontend is draining", retry_after_ms=self._retry_after_ms)

    def _check(self, limit: str, most: int, present: int, more: int) -> None:
        if present + more <= most:
            return
        self._metrics.rejections[limit].inc()
        raise ResourceExhausted(
            f"{limit}: {present} in flight and {more} asked for exceed {most}", retry_after_ms=self._retry_after_ms
        )

    def rate_limits(self) -> list[RateLimit]:
        """What may be in flight at once, of all clients together. Places come back as answers end: a moment after."""
        reset_s = self._retry_after_ms / 1000
        found: list[tuple[Literal["requests", "tokens"], int, int]] = [
            ("requests", self._max_samples, self.num_samples),
            ("tokens", self._max_tokens, self.num_tokens),
        ]
        return [RateLimit(of, most, most - taken, reset_s if taken >= most else 0.0) for of, most, taken in found]

    def add(self, lease: Lease, num_samples: int, num_tokens: int) -> None:
        """What `lease` holds and what is held in all change together."""
        lease.num_samples += num_samples
        lease.num_tokens += num_tokens
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        if self.num_samples:
            self._idle.clear()
        else:
            self._idle.set()

    def close(self) -> None:
        """Nothing more is admitted."""
        self._closed = True

    async def idle(self) -> None:
        """Returns once nothing is in flight."""
        await self._idle.wait()
