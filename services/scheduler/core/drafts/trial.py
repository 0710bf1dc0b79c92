"""A draft length under trial for a few steps, and the evidence that these steps give.

The time of a step is a median, because steps that waited for something else are no measure. Steps in which a sequence
drafted and steps without any draft have separate medians, because on a GPU the latter are ten times shorter. Tokens are
counted in the same steps; where few sequences run, and so few tokens are counted, they are mostly estimated from the
acceptance rates of many steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.drafts.acceptance_rates import AcceptanceRates

PRIOR_WEIGHT = 64  # samples (sequences times steps) that weigh as much as the estimate from acceptance rates
MIN_ERROR = 0.001  # relative

StepTime = tuple[float, bool]  # seconds; whether a sequence drafted in the step


@dataclass(frozen=True, slots=True)
class TrialEvidence:
    """Relative advantage of a length over the required speed, and its standard error."""

    advantage: float
    error: float

    def combine(self, other: TrialEvidence | None, share: float) -> TrialEvidence:
        """Returns the mean with earlier evidence, weighted by inverse variance; the earlier one counts with `share`
        of its weight. None: no earlier evidence."""
        if other is None:
            return self
        weight, other_weight = self.error**-2, share * other.error**-2
        advantage = (weight * self.advantage + other_weight * other.advantage) / (weight + other_weight)
        return TrialEvidence(advantage, (weight + other_weight) ** -0.5)


@dataclass(slots=True)
class LengthTrial:
    """Measurements of one draft length since its trial started."""

    length: int
    times: list[StepTime] = field(default_factory=list)
    seconds: float = 0.0  # duration of the trial, unmeasured steps included
    num_too_slow: int = 0  # steps
    was_too_slow: bool = False  # whether the last step was
    num_mixed: int = 0
    _num_counted: int = 0  # samples: sequences times steps
    _num_right: int = 0  # accepted drafts in these samples

    def count_accepted(self, accepted: npt.NDArray[np.int64]) -> None:
        """Adds the accepted drafts of each sequence of a step."""
        self._num_counted += len(accepted)
        self._num_right += int(accepted.sum())

    def count_no_drafts(self, num_sequences: int) -> None:
        self._num_counted += num_sequences

    def speed(self, odds: AcceptanceRates) -> float:
        """Returns the tokens per second and sequence."""
        return self._tokens(odds) / typical(self.times)

    def compare_with(
        self, required_speed: float, present: Collection[StepTime], odds: AcceptanceRates
    ) -> TrialEvidence:
        """Compares the trial's speed with `required_speed`. `present`: the step times that it was derived from, which
        show how much equal steps vary."""
        times = spread(present) ** 2 * (1 / len(self.times) + 1 / len(present))
        tokens = odds.deviation(self.length) ** 2 / max(self._num_counted, 1)
        return TrialEvidence(self.speed(odds) / required_speed - 1, max((times + tokens) ** 0.5, MIN_ERROR))

    def _tokens(self, odds: AcceptanceRates) -> float:
        """Returns the tokens of a sequence per step: the mean counted in this trial, blended with the expectation
        from the acceptance rates, which weighs less the more samples the trial has."""
        expected = odds.tokens(self.length)
        if not self._num_counted:
            return expected
        counted = 1.0 + self._num_right / self._num_counted
        weight = self._num_counted / (self._num_counted + PRIOR_WEIGHT)
        return weight * counted + (1 - weight) * expected


def typical(times: Collection[StepTime]) -> float:
    """Returns the seconds of a typical step: the mean of the medians of both kinds, weighted by their numbers."""
    return sum(len(kind) * statistics.median(kind) for kind in _kinds(times)) / len(times)


def spread(times: Collection[StepTime]) -> float:
    """Returns the standard deviation of a step's time relative to the median, estimated from the interquartile
    range; 0 for fewer than two times."""
    if len(times) < 2:
        return 0.0
    parts = [seconds / statistics.median(kind) for kind in _kinds(times) for seconds in kind]
    low, _, high = statistics.quantiles(parts, n=4)
    return 0.93 * (high - low)  # 1.25 standard deviations


def _kinds(times: Collection[StepTime]) -> list[list[float]]:
    kinds = ([seconds for seconds, drafted in times if drafted is kind] for kind in (False, True))
    return [kind for kind in kinds if kind]
