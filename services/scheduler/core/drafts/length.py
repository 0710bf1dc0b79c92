"""Adapts the draft length to measured step times and acceptance rates.

Drafts pay while a step has room for more tokens than there are sequences. Their cost depends on the device, on the
number of running sequences and on the drafter, none of which is known in advance. So the tuner runs trials: now and
then it uses another length for a few steps, and keeps the longer of the two lengths if it gives clearly more tokens per
second. Where step times of equal steps vary much, a trial takes longer and is judged together with earlier ones. Trials
become rarer while they change nothing. Each power of two of running sequences (size class) has its own length. A
hysteresis keeps the size class when the number of sequences crosses a power of two by a little; otherwise such
fluctuation would end every trial.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.drafts.acceptance_rates import AcceptanceRates
from quire.services.scheduler.core.drafts.trial import LengthTrial, StepTime, TrialEvidence, typical

SMALL_BATCH = 7  # sequences up to which drafts may be long before anything is measured
SIZE_CLASS_HYSTERESIS = 0.25  # relative overshoot of a power of two before the size class changes
MIN_SAMPLES = 3  # steps after which a trial may be rejected
SAMPLES, MAX_SAMPLES = 8, 32  # steps after which a trial may be adopted; steps after which it must be decided
CONFIDENCE_SIGMAS = 2.0  # standard errors
EVIDENCE_DECAY = 0.5  # weight of an earlier trial's evidence for the next trial of the same length
NUM_IGNORED_STEPS = 3  # steps after a change of length that are not measured: others were in flight
FIRST_TRIAL_AFTER = 8  # steps at a length before the first trial
MAX_PATIENCE, MAX_PATIENCE_S = 8192, 15.0  # steps, seconds; a trial takes 11 steps if they are alike, a hopeless one 6
MAX_MIXED_STEPS = 3  # mixed steps (other work as well) after which a trial is postponed; they are not measured
TOO_SLOW_FACTOR = 3  # times slower than the current length, at best; two such steps end a trial at once
MIN_COOLDOWN, MAX_COOLDOWN = (
    8,
    256,
)  # multiples of the time that a trial lost; limits the loss where drafting steps are slow
MAX_INHERITED_PATIENCE = 64  # steps; patience that a regime takes over at most from the one that it starts from
MIN_GAIN = 1.03  # required speed ratio of the longer of two lengths to the shorter


@dataclass(slots=True)
class Regime:
    """State of one size class: its length, its step times and the schedule of its trials."""

    length: int
    patience: int = FIRST_TRIAL_AFTER  # steps until the next trial
    next_candidate: int = 0  # index of the next candidate: no drafts, then longer and shorter lengths in turn
    steps_waited: int = 0
    seconds_waited: float = 0.0
    cooldown: int = MIN_COOLDOWN  # multiples of the time that an unsuccessful trial lost
    cooldown_s: float = 0.0  # seconds until the next trial
    times: deque[StepTime] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))  # of steps at `length`
    evidence: dict[int, TrialEvidence] = field(default_factory=dict)  # of unsuccessful trials, by length


class DraftLengthTuner:
    """Chooses the number of drafts per sequence of each step from the measurements of earlier steps."""

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        """Starts with the maximum length. `most`: maximum drafts per sequence; 0: never drafts. `fixed`: always uses
        the maximum, without trials."""
        self._most = most
        self._fixed = fixed or most == 0
        self._ladder = sorted({0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, most} & set(range(most + 1)))
        self._regimes: dict[int, Regime] = {}  # by size class
        self._odds = AcceptanceRates(most)
        self._trial: LengthTrial | None = None
        self._size_class = -1
        self._num_sequences = -1  # of the last call without new sequences; they belong to `_size_class`
        self._length = most
        self._num_to_ignore = 0

    def choose(self, num_sequences: int, num_new_seqs: int = 0) -> int:
        """Returns the drafts per sequence for a step that advances `num_sequences`. `num_new_seqs`: sequences admitted
        in this step; if a length is known for all of them together, it applies at once, so that the first sequences of
        a burst do not draft too much."""
        if self._fixed or (num_sequences == self._num_sequences and not num_new_seqs):
            return self._length
        size_class, size_class_with_new = self._class_of(num_sequences), self._class_of(num_sequences + num_new_seqs)
        if size_class_with_new in self._regimes and self._regimes[size_class_with_new].times:
            size_class = size_class_with_new
        if size_class != self._size_class:
            self._enter_size_class(size_class)
        self._num_sequences = -1 if num_new_seqs else num_sequences
        return self._length

    def observe(self, num_sequences: int, length: int, seconds: float, *, alone: bool, drafted: bool) -> None:
        """Records the time of a step with drafts of `length`. `alone`: the step did no other work and started without
        waiting; `drafted`: at least one sequence had a draft."""
        if self._fixed or length != self._length:
            return
        if num_sequences != self._num_sequences and self._class_of(num_sequences) != self._size_class:
            return
        if self._trial is not None:
            self._trial.seconds += seconds
            if self._ends_trial(self._trial, seconds, alone=alone, drafted=drafted):
                return
        if self._num_to_ignore > 0:
            self._num_to_ignore -= 1
        elif alone and seconds > 0:
            self._record_time((seconds, drafted))

    def observe_accepted(self, accepted: npt.NDArray[np.int64], length: int) -> None:
        """Records the accepted drafts of each sequence [num_sequences] in a step with drafts of `length`, for the
        acceptance rates and for the trial of this length, if one runs."""
        self._odds.observe(accepted, length)
        if self._trial is not None and self._trial.length == length:
            self._trial.count_accepted(accepted)

    def observe_no_drafts(self, num_sequences: int, length: int) -> None:
        """Records a step with drafts of `length` in which no sequence had a draft, for the acceptance rates and for
        the trial of this length, if one runs."""
        self._odds.observe_no_drafts(num_sequences, length)
        if self._trial is not None and self._trial.length == length:
            self._trial.count_no_drafts(num_sequences)

    @property
    def awaits_trial_result(self) -> bool:
        """Whether a trial has no result yet, or its last step was far too slow: then no second step is planned
        ahead."""
        return self._trial is not None and (self._trial.seconds == 0.0 or self._trial.was_too_slow)

    def _class_of(self, num_sequences: int) -> int:
        """Returns the size class of `num_sequences`: their bit length, or the current class while the hysteresis
        allows it."""
        least = 2.0 ** (self._size_class - 1) if self._size_class > 0 else 0.0
        if (1 - SIZE_CLASS_HYSTERESIS) * least <= num_sequences < (1 + SIZE_CLASS_HYSTERESIS) * 2 * least:
            return self._size_class
        return num_sequences.bit_length()

    def _enter_size_class(self, size_class: int) -> None:
        """Switches to the length that was best in this size class, or to that of the previous class if no step was
        measured in this one; ends a trial without a result."""
        regime = self._regimes.get(size_class)
        if regime is None or not regime.times:
            self._regimes[size_class] = self._first_regime(size_class)
        self._size_class = size_class
        self._set_length(self._regimes[size_class].length, None)

    def _first_regime(self, size_class: int) -> Regime:
        """Returns the initial state of a size class without measurements: length and trial schedule of the current
        class, or, at the first class and after a jump of more than one class, the maximum length for small batches
        and no drafts for large ones."""
        before = self._regimes.get(self._size_class)
        if before is None or size_class > self._size_class + 1:
            return Regime(self._most if size_class <= SMALL_BATCH.bit_length() else 0)
        patience = min(before.patience, MAX_INHERITED_PATIENCE)
        return Regime(before.length, patience, cooldown=before.cooldown, cooldown_s=max(0.0, before.cooldown_s))

    def _set_length(self, length: int, trial: LengthTrial | None) -> None:
        changed = length != self._length
        self._length, self._trial = length, trial
        self._num_to_ignore = NUM_IGNORED_STEPS if changed else self._num_to_ignore

    def _record_time(self, time: StepTime) -> None:
        """Adds a step's time to the trial, which is judged once it has enough samples, or to the current length;
        starts the next trial when it is due."""
        regime = self._regimes[self._size_class]
        if self._trial is not None:
            self._trial.times.append(time)
            if len(self._trial.times) >= MIN_SAMPLES:
                self._judge(regime, self._trial)
            return
        regime.times.append(time)
        regime.steps_waited += 1
        regime.seconds_waited += time[0]
        regime.cooldown_s -= time[0]
        is_due = regime.steps_waited >= regime.patience or regime.seconds_waited >= MAX_PATIENCE_S
        if is_due and regime.cooldown_s <= 0 and len(regime.times) >= SAMPLES:
            self._start_trial(regime)

    def _start_trial(self, regime: Regime) -> None:
        regime.steps_waited, regime.seconds_waited = 0, 0.0
        length = self._candidate(regime)
        self._set_length(length, LengthTrial(length))

    def _candidate(self, regime: Regime) -> int:
        """Returns the length of the next trial. No drafts at all comes first: that is the answer under load, and the
        path there over shorter lengths would be long, or blocked where every length costs the same."""
        index = self._ladder.index(regime.length)
        around = [0, *(self._ladder[i] for i in (index + 1, index - 1, index + 2) if 0 <= i < len(self._ladder))]
        candidates = [length for length in dict.fromkeys(around) if length != regime.length]
        turn, regime.next_candidate = regime.next_candidate, regime.next_candidate + 1
        return candidates[turn % len(candidates)]

    def _judge(self, regime: Regime, trial: LengthTrial) -> None:
        """Ends the trial once its result is certain, or after MAX_SAMPLES. In doubt the shorter length stays, unless
        the longer one is probably better."""
        count, is_longer = len(trial.times), trial.length > regime.length
        required_speed = self._current_speed(regime) * (MIN_GAIN if is_longer else 1 / MIN_GAIN)
        evidence = trial.compare_with(required_speed, regime.times, self._odds)
        evidence = evidence.combine(regime.evidence.get(trial.length), EVIDENCE_DECAY)
        is_certain = abs(evidence.advantage) > CONFIDENCE_SIGMAS * evidence.error
        if count < (SAMPLES if is_certain else MAX_SAMPLES) and not (is_certain and evidence.advantage < 0):
            return
        if evidence.advantage < (evidence.error if is_longer else 0.0):
            regime.evidence[trial.length] = evidence
            self._reject(regime, trial, 2 if count >= SAMPLES else 4)
        else:
            self._adopt(regime, trial)

    def _adopt(self, regime: Regime, trial: LengthTrial) -> None:
        """Makes the trial's length the regime's length, keeps the trial's step times, drops older evidence and makes
        the next trials more frequent."""
        regime.length, regime.patience = trial.length, max(FIRST_TRIAL_AFTER, regime.patience // 4)
        regime.cooldown, regime.cooldown_s = max(MIN_COOLDOWN, regime.cooldown // 4), 0.0
        regime.times = deque(trial.times, maxlen=regime.times.maxlen)
        regime.evidence = {}
        self._set_length(regime.length, None)

    def _ends_trial(self, trial: LengthTrial, seconds: float, *, alone: bool, drafted: bool) -> bool:
        """Ends the trial before it has enough samples if its steps are far too slow (rejected) or too many did other
        work as well (postponed); returns whether it did. `seconds`: duration of the step."""
        regime = self._regimes[self._size_class]
        if not alone:
            trial.num_mixed += 1
        elif drafted:
            trial.was_too_slow = (1 + trial.length) * TOO_SLOW_FACTOR < self._current_speed(regime) * seconds
            trial.num_too_slow += trial.was_too_slow
        if trial.num_too_slow == 2:
            trial.times.append((seconds, True))
            self._reject(regime, trial, 4)
        elif trial.num_mixed == MAX_MIXED_STEPS:
            self._postpone(regime, trial)
        return self._trial is not trial

    def _reject(self, regime: Regime, trial: LengthTrial, factor: int) -> None:
        """Ends the trial without adopting its length and makes the next one rarer by `factor`, with a cooldown in
        proportion to the time that the trial lost."""
        regime.patience = min(factor * regime.patience, MAX_PATIENCE)
        regime.cooldown = min(factor * regime.cooldown, MAX_COOLDOWN)
        lost_share = 1 - trial.speed(self._odds) / self._current_speed(regime)
        regime.cooldown_s = regime.cooldown * trial.seconds * max(lost_share, 0.0)
        self._set_length(regime.length, None)

    def _postpone(self, regime: Regime, trial: LengthTrial) -> None:
        """Ends the trial without a result, because its loss is unknown, returns to the regime's length and doubles
        the steps until the next trial."""
        regime.patience = min(2 * regime.patience, MAX_PATIENCE)
        regime.cooldown_s = MIN_COOLDOWN * trial.seconds
        self._set_length(regime.length, None)

    def _current_speed(self, regime: Regime) -> float:
        """Returns the expected tokens per second and sequence at the regime's length."""
        return self._odds.tokens(regime.length) / typical(regime.times)
