"""How often drafts are right, position by position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

INITIAL_ACCEPTANCE = 0.7  # how often a position is right of which nothing is known, if the one before is
MIN_WEIGHT, MAX_WEIGHT = 0.02, 0.1  # of a step with 8 sequences, or fewer, and with 40


class AcceptanceRates:
    """Smoothed over the last steps: few where many sequences run."""

    def __init__(self, most: int) -> None:
        """`most`: drafts of a sequence."""
        self._right: npt.NDArray[np.float64] = np.float64(INITIAL_ACCEPTANCE) ** np.arange(
            1, most + 1
        )  # so many, and more

    def observe(self, accepted: npt.NDArray[np.int64], length: int) -> None:
        """Of a step with drafts of `length`: how many were right, for each sequence."""
        if length and len(accepted):
            right = (accepted[:, None] > np.arange(length)).mean(axis=0)
            self._right[:length] += _weight(len(accepted)) * (right - self._right[:length])

    def observe_no_drafts(self, num_sequences: int, length: int) -> None:
        self._right[:length] *= 1 - _weight(num_sequences)

    def tokens(self, length: int) -> float:
        """Expected of a sequence in a step."""
        return 1.0 + float(self._right[:length].sum())

    def deviation(self, length: int) -> float:
        """Standard deviation of a sequence's tokens, as a part of them."""
        right = self._right[:length]
        mean, squares = float(right.sum()), float((right * np.arange(1, 2 * len(right), 2)).sum())
        return float(max(squares - mean**2, 0.0) ** 0.5 / (1 + mean))


def _weight(num_sequences: int) -> float:
    return min(MIN_WEIGHT * max(num_sequences / 8, 1.0), MAX_WEIGHT)
