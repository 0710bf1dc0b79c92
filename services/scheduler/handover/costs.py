"""What it costs to get KV from another worker, and what computing it costs. Pure: numbers in, decisions out."""

from __future__ import annotations

OVERHEAD_S = 0.004  # of a fetch, whatever its size: two hops, a call and its proof
FIRST_BYTES_PER_S = 200e6  # until one has been measured: what gRPC carries between two processes of a busy machine
SMOOTHING = 0.3
TRIED_AGAIN_AFTER = 64  # chances that were let pass: links and loads change, and only a fetch can tell


class LinkRate:
    """How fast KV comes to a worker, learned from the fetches that it was ordered."""

    def __init__(self) -> None:
        self._seconds_per_byte = 1 / FIRST_BYTES_PER_S
        self._is_measured = False
        self._num_passed = 0

    @property
    def bytes_per_s(self) -> float:
        return 1 / self._seconds_per_byte

    def learn(self, num_bytes: int, seconds: float) -> None:
        """`seconds`: from the first byte to the last."""
        if num_bytes <= 0 or seconds <= 0:
            return
        measured = seconds / num_bytes
        known = self._seconds_per_byte if self._is_measured else measured
        self._seconds_per_byte = known + SMOOTHING * (measured - known)
        self._is_measured = True

    def seconds_for(self, num_bytes: int) -> float:
        return OVERHEAD_S + num_bytes * self._seconds_per_byte

    def pays(self, num_bytes: int, compute_s: float) -> bool:
        """Whether to get so many bytes rather than to compute them in `compute_s`; 0: nobody knows how long that
        takes. Now and then it tries what did not pay before."""
        if compute_s <= 0:
            return False
        self._num_passed += 1
        again = self._num_passed > TRIED_AGAIN_AFTER and compute_s > OVERHEAD_S
        if self.seconds_for(num_bytes) >= compute_s and not again:
            return False
        self._num_passed = 0
        return True
