"""Forecast of the peak number of blocks that the running sequences need, so that no sequence is admitted only to be
preempted.

The length of an answer is unknown; the lengths of past answers are known. A running sequence is expected to produce a
fraction of what past answers of at least its length still produced on average, and never more than its limit (after the
past-future scheduler, arXiv 2507.10150). Sequences end at different times, so the peak is far below the sum of all
limits. Admitting every sequence that fits now would compute 18 to 36 % of all tokens of an offline trace twice or more;
with this forecast it is mostly under 3 % (tests/services/scheduler/core/timing/test_preemption_waste.py).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.running.running import Mask, Running
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.kv_cache.groups import KVGroups

REMEMBERED_ANSWERS = 256
# Factor of the mean: at 1.0 nothing is computed twice, but the batch is up to a tenth smaller than it could be; at 0.6
# traces of uniform, exponential and two-peaked answers ended within 5 % of the time that the fullest batch needs, or
# earlier.
OPTIMISM = 0.6
UNKNOWN_OUTPUT_TOKENS = 512  # expected output of a sequence, up to its limit, while no answer has been observed

Lengths = npt.NDArray[np.int64]


class Forecast:
    """Expected output lengths from answers that ended by themselves or at their limit."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED_ANSWERS)
        self._curve: tuple[Lengths, npt.NDArray[np.float64]] | None = None

    def observe(self, num_output_tokens: int) -> None:
        self._lengths.append(num_output_tokens)
        self._curve = None

    def fits(self, running: Running, counted: Mask, newcomer: Sequence, num_blocks: int, groups: KVGroups) -> bool:
        """Returns whether `num_blocks` blocks suffice for `newcomer` and the `counted` running sequences (a mask by
        slot) until they end with the expected output lengths."""
        lengths = np.append(running.num_tokens[counted], newcomer.num_tokens).astype(np.int64)
        limits = np.append(running.limit[counted], newcomer.max_total_tokens)
        prompts = np.append(running.num_prompt_tokens[counted], newcomer.num_prompt_tokens)
        rest = self._remaining(lengths - prompts, limits - prompts)
        return peak_blocks(lengths, rest, groups) <= num_blocks

    def _remaining(self, produced: Lengths, most: Lengths) -> Lengths:
        """Returns the expected remaining output tokens of each sequence, at least 1."""
        if not self._lengths:
            expected = np.maximum(produced + 1, UNKNOWN_OUTPUT_TOKENS)
        else:
            expected = self._expected(produced, most)
        return np.maximum(1, np.minimum(expected, most) - produced)

    def _expected(self, produced: Lengths, most: Lengths) -> Lengths:
        """Returns the expected final output length of each sequence; its limit if no past answer was longer than its
        current output."""
        if self._curve is None:
            known = np.sort(np.array(self._lengths, dtype=np.int64))
            counts = np.arange(len(known), 0, -1)
            self._curve = known, np.cumsum(known[::-1])[::-1] / counts  # mean of the answers that are at least as long
        known, means = self._curve
        longer = np.searchsorted(known, produced, side="right")  # index of the first past answer that was longer
        seen = longer < len(known)
        mean = means[np.minimum(longer, len(known) - 1)]
        expected: Lengths = np.where(seen, produced + OPTIMISM * (mean - produced), most).astype(np.int64)
        return expected


def peak_blocks(lengths: Lengths, rest: Lengths, groups: KVGroups) -> int:
    """Returns the maximum number of blocks in use at any time, if sequence i has lengths[i] tokens now and ends after
    rest[i] more.

    The peak is at one of the ends: just before the k-th longest remaining sequence ends, it and all longer ones are
    live.
    """
    order = np.argsort(-rest)
    remaining = rest[order]
    num_live = np.arange(1, len(order) + 1)
    tokens = np.cumsum(lengths[order]) + num_live * remaining
    positions = tokens / groups.block_size + num_live  # each sequence may leave most of a block unused
    return int(groups.peak(positions, num_live).max())
