"""What it costs to get KV from another worker, and what computing it costs. Pure: numbers in, decisions out."""

from __future__ import annotations

OVERHEAD_S = 0.004  # of a fetch, whatever its size: two hops, a call and its proof
FIRST_BYTES_PER_S = 200e6  # until one has been measured: what gRPC carries between two processes of a busy machine
SMOOTHING = 0.3
RETRY_AFTER_SKIPPED = 64  # chances that were let pass: links and loads change, and only a fetch can tell
MAX_SKIPPED = 1024  # chances, after many failures in a row


class WorkerLink:
    """From one worker to another: whether KV comes at all, and how fast, learned from the fetches that were ordered."""

    def __init__(self) -> None:
        self._seconds_per_byte = 1 / FIRST_BYTES_PER_S
        self._is_measured = False
        self._num_skipped = 0
        self._num_failed = 0  # in a row
        self._num_to_skip = 0  # chances, before it is tried again

    @property
    def bytes_per_s(self) -> float:
        return 1 / self._seconds_per_byte

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A fetch went well. `seconds`: from the first byte to the last."""
        self._num_failed = self._num_to_skip = 0
        if num_bytes <= 0 or seconds <= 0:
            return
        measured = seconds / num_bytes
        known = self._seconds_per_byte if self._is_measured else measured
        self._seconds_per_byte = known + SMOOTHING * (measured - known)
        self._is_measured = True

    def record_failure(self) -> None:
        """A fetch did. The next chances are let pass, twice as many each time: whoever waits for a fetch that fails
        loses seconds."""
        self._num_failed += 1
        self._num_to_skip = min(2**self._num_failed, MAX_SKIPPED)

    @property
    def is_healthy(self) -> bool:
        """The last fetch did, as far as is known."""
        return not self._num_to_skip

    def allow_attempt(self) -> bool:
        """To be asked at every chance: False while fetches fail, but for one now and then."""
        if self._num_to_skip:
            self._num_to_skip -= 1
            return False
        return True

    def seconds_for(self, num_bytes: int) -> float:
        return OVERHEAD_S + num_bytes * self._seconds_per_byte

    def is_worth_fetching(self, num_bytes: int, compute_s: float) -> bool:
        """Whether to get so many bytes rather than to compute them in `compute_s`; 0: nobody knows how long that
        takes. Now and then it tries what did not pay before."""
        if compute_s <= 0:
            return False
        self._num_skipped += 1
        again = self._num_skipped > RETRY_AFTER_SKIPPED and compute_s > OVERHEAD_S
        if self.seconds_for(num_bytes) >= compute_s and not again:
            return False
        self._num_skipped = 0
        return True
