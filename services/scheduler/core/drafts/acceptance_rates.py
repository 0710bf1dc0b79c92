"""Acceptance rates of drafts by position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

INITIAL_ACCEPTANCE = 0.7  # prior of the acceptance of a position, given that the position before was accepted
MIN_WEIGHT, MAX_WEIGHT = 0.02, 0.1  # weight of a step with at most 8 sequences, and with at least 40


class AcceptanceRates:
    """Exponential averages over the last steps; a step weighs more the more sequences it has."""

    def __init__(self, most: int) -> None:
        """`most`: maximum drafts of a sequence."""
        # [most] probability that at least 1, 2, ... drafts are accepted
        self._accepted: npt.NDArray[np.float64] = np.float64(INITIAL_ACCEPTANCE) ** np.arange(1, most + 1)

    def observe(self, accepted: npt.NDArray[np.int64], length: int) -> None:
        """Records the accepted drafts of each sequence [num_sequences] in a step with drafts of `length`: moves the
        rate of each position towards the share of sequences that accepted it."""
        if length and len(accepted):
            right = (accepted[:, None] > np.arange(length)).mean(axis=0)
            self._accepted[:length] += _weight(len(accepted)) * (right - self._accepted[:length])

    def observe_no_drafts(self, num_sequences: int, length: int) -> None:
        """Records a step with drafts of `length` in which no sequence had a draft."""
        self._accepted[:length] *= 1 - _weight(num_sequences)

    def tokens(self, length: int) -> float:
        """Expected tokens of a sequence in a step with drafts of `length`."""
        return 1.0 + float(self._accepted[:length].sum())

    def deviation(self, length: int) -> float:
        """Standard deviation of a sequence's tokens in a step, relative to their mean."""
        right = self._accepted[:length]
        mean, squares = float(right.sum()), float((right * np.arange(1, 2 * len(right), 2)).sum())
        return float(max(squares - mean**2, 0.0) ** 0.5 / (1 + mean))


def _weight(num_sequences: int) -> float:
    return min(MIN_WEIGHT * max(num_sequences / 8, 1.0), MAX_WEIGHT)
