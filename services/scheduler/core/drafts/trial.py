"""A length of drafts that is tried for a few steps, and what these steps say of it.

The time of a step is a median, because steps that wait for something else are no measure; one for steps in which
somebody drafted and one for those in which nobody found anything to draft, because on a GPU these are ten times
shorter. Tokens are counted in the same steps, and where few sequences run, so that few are counted, they are mostly
estimated from how often drafts were right over many steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.drafts.acceptance_rates import AcceptanceRates

PRIOR_WEIGHT = 64  # sequences and steps whose tokens weigh as much as the estimate
MIN_ERROR = 0.001  # of what is measured

StepTime = tuple[float, bool]  # seconds; whether anybody drafted


@dataclass(frozen=True, slots=True)
class TrialEvidence:
    """By how much a length is faster than it has to be, and the standard error of that. Both are parts of its speed."""

    advantage: float
    error: float

    def combine(self, other: TrialEvidence | None, share: float) -> TrialEvidence:
        """`share`: of what the other one weighs."""
        if other is None:
            return self
        mine, others = self.error**-2, share * other.error**-2
        advantage = (mine * self.advantage + others * other.advantage) / (mine + others)
        return TrialEvidence(advantage, (mine + others) ** -0.5)


@dataclass(slots=True)
class LengthTrial:
    """Steps of one draft length that have been timed since it was tried last."""

    length: int
    times: list[StepTime] = field(default_factory=list)
    seconds: float = 0.0  # that it has taken, with what says nothing
    num_too_slow: int = 0  # steps
    was_too_slow: bool = False  # the last one
    num_mixed: int = 0
    _num_counted: int = 0  # sequences and steps
    _num_right: int = 0  # drafts in them

    def count_accepted(self, accepted: npt.NDArray[np.int64]) -> None:
        """Tokens beyond the first, of each sequence of a step."""
        self._num_counted += len(accepted)
        self._num_right += int(accepted.sum())

    def count_no_drafts(self, num_sequences: int) -> None:
        self._num_counted += num_sequences

    def speed(self, odds: AcceptanceRates) -> float:
        """Tokens per second and sequence."""
        return self._tokens(odds) / typical(self.times)

    def compare_with(self, wanted: float, present: Collection[StepTime], odds: AcceptanceRates) -> TrialEvidence:
        """`wanted`: a speed; `present`: the steps that it was measured in, which say how much equal steps differ."""
        times = spread(present) ** 2 * (1 / len(self.times) + 1 / len(present))
        tokens = odds.deviation(self.length) ** 2 / max(self._num_counted, 1)
        return TrialEvidence(self.speed(odds) / wanted - 1, max((times + tokens) ** 0.5, MIN_ERROR))

    def _tokens(self, odds: AcceptanceRates) -> float:
        expected = odds.tokens(self.length)
        if not self._num_counted:
            return expected
        counted = 1.0 + self._num_right / self._num_counted
        weight = self._num_counted / (self._num_counted + PRIOR_WEIGHT)
        return weight * counted + (1 - weight) * expected


def typical(times: Collection[StepTime]) -> float:
    """Seconds of a step: the mean of the medians of both kinds."""
    return sum(len(kind) * statistics.median(kind) for kind in _kinds(times)) / len(times)


def spread(times: Collection[StepTime]) -> float:
    """Standard error of what one step says of the median, as a part of it: from how far the middle half are apart."""
    if len(times) < 2:
        return 0.0
    parts = [seconds / statistics.median(kind) for kind in _kinds(times) for seconds in kind]
    low, _, high = statistics.quantiles(parts, n=4)
    return 0.93 * (high - low)  # 1.25 standard deviations


def _kinds(times: Collection[StepTime]) -> list[list[float]]:
    kinds = ([seconds for seconds, drafted in times if drafted is kind] for kind in (False, True))
    return [kind for kind in kinds if kind]
