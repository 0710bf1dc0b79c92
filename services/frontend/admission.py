"""The door: how much work a frontend takes at a time, decided before anything is computed for it."""

from __future__ import annotations

import asyncio

from shared.errors import ResourceExhausted, Unavailable
from shared.metrics.frontend import FrontendMetrics


class Lease:
    """A request's share of the budget, given back once."""

    def __init__(self, admission: Admission, num_samples: int, num_tokens: int) -> None:
        self._admission = admission
        self.num_samples = num_samples
        self.num_tokens = num_tokens

    def settle(self, num_tokens: int) -> None:
        """The true number of tokens, known after tokenizing; what was admitted stays admitted."""
        self._admission.add(0, num_tokens - self.num_tokens)
        self.num_tokens = num_tokens

    def release(self) -> None:
        self._admission.add(-self.num_samples, -self.num_tokens)
        self.num_samples = self.num_tokens = 0


class Admission:
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

    def check_open(self) -> None:
        """Raises what the smallest request would be told."""
        self._check_closed()
        self._check("max_inflight_requests", self._max_samples, self.num_samples, 1)
        self._check("max_queued_tokens", self._max_tokens, self.num_tokens, 1)

    def admit(self, num_samples: int, num_tokens: int) -> Lease:
        """All or nothing; ResourceExhausted with a hint when full, Unavailable once closed."""
        self._check_closed()
        self._check("max_inflight_requests", self._max_samples, self.num_samples, num_samples)
        self._check("max_queued_tokens", self._max_tokens, self.num_tokens, num_tokens)
        self.add(num_samples, num_tokens)
        return Lease(self, num_samples, num_tokens)

    def _check_closed(self) -> None:
        if self._closed:
            raise Unavailable("this frontend is draining", retry_after_ms=self._retry_after_ms)

    def _check(self, limit: str, most: int, present: int, more: int) -> None:
        if not self.num_samples or present + more <= most:
            return
        self._metrics.rejections[limit].inc()
        raise ResourceExhausted(
            f"{limit}: {present} in flight and {more} asked for exceed {most}", retry_after_ms=self._retry_after_ms
        )

    def add(self, num_samples: int, num_tokens: int) -> None:
        self.num_samples += num_samples
        self.num_tokens += num_tokens
        self._metrics.inflight_requests.set(self.num_samples)
        self._metrics.queued_tokens.set(self.num_tokens)
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
