"""Cost of fetching KV from another worker, compared with computing it. Pure: numbers in, decisions out."""

from __future__ import annotations

OVERHEAD_S = 0.004  # overhead of a fetch, independent of its size: two hops, a call and its proof
FIRST_BYTES_PER_S = 200e6  # before the first measurement: gRPC throughput between two processes of a busy machine
SMOOTHING = 0.3
RETRY_AFTER_SKIPPED = 64  # skipped fetches before another attempt: links and loads change, and only a fetch shows it
MAX_SKIPPED = 1024  # maximum skipped fetches after many failures in a row


class WorkerLink:
    """Link from one worker to another: whether fetches succeed, and their throughput."""

    def __init__(self) -> None:
        self._seconds_per_byte = 1 / FIRST_BYTES_PER_S
        self._is_measured = False
        self._num_skipped = 0
        self._num_failed = 0  # consecutive failures
        self._num_to_skip = 0  # fetches to skip before the next attempt

    @property
    def bytes_per_s(self) -> float:
        return 1 / self._seconds_per_byte

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Records a successful fetch. `seconds`: from the first byte to the last."""
        self._num_failed = self._num_to_skip = 0
        if num_bytes <= 0 or seconds <= 0:
            return
        measured = seconds / num_bytes
        known = self._seconds_per_byte if self._is_measured else measured
        self._seconds_per_byte = known + SMOOTHING * (measured - known)
        self._is_measured = True

    def record_failure(self) -> None:
        """Records a failed fetch. The next fetches are skipped, twice as many after each failure, because a sequence
        that waits for a failing fetch loses seconds."""
        self._num_failed += 1
        self._num_to_skip = min(2**self._num_failed, MAX_SKIPPED)

    @property
    def is_healthy(self) -> bool:
        """Whether the last fetch succeeded, as far as is known."""
        return not self._num_to_skip

    def allow_attempt(self) -> bool:
        """Returns whether a fetch may be tried; called for every possible fetch. While fetches fail, it is True only
        now and then."""
        if self._num_to_skip:
            self._num_to_skip -= 1
            return False
        return True

    def seconds_for(self, num_bytes: int) -> float:
        return OVERHEAD_S + num_bytes * self._seconds_per_byte

    def is_worth_fetching(self, num_bytes: int, compute_s: float) -> bool:
        """Returns whether fetching `num_bytes` is faster than computing them in `compute_s`; 0: unknown. Now and then
        returns True for a fetch that was not worth it before."""
        if compute_s <= 0:
            return False
        self._num_skipped += 1
        again = self._num_skipped > RETRY_AFTER_SKIPPED and compute_s > OVERHEAD_S
        if self.seconds_for(num_bytes) >= compute_s and not again:
            return False
        self._num_skipped = 0
        return True
