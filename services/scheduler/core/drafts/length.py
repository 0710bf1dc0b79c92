"""How long drafts should be, learned from what steps take and what becomes of drafts.

Drafts pay while a step has room for more tokens than there are sequences: what they cost depends on the device, on how
many sequences run, and on who drafts; none of that is known beforehand. So lengths are tried: for a few steps now and
then another one than the present, and the longer of the two stays if it gives clearly more tokens per second. Where
equal steps differ much, a try takes longer and is judged together with those before it. Tries become rarer while they
change nothing. Each power of two of running sequences has a length of its own, which also goes for a few more and a few
less: numbers that go to and fro about a power of two would end every try.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.drafts.acceptance_rates import AcceptanceRates
from quire.services.scheduler.core.drafts.trial import LengthTrial, StepTime, TrialEvidence, typical

SMALL_BATCH = 7  # sequences for which drafts may be long before anything is known
SIZE_CLASS_HYSTERESIS = 0.25  # by so much the number of sequences may leave its power of two before another length goes
MIN_SAMPLES = 3  # steps after which a try may be given up
SAMPLES, MAX_SAMPLES = 8, 32  # after which it may succeed, and in which it must
CONFIDENCE_SIGMAS = 2.0  # standard errors
EVIDENCE_DECAY = 0.5  # of what a try has shown, for the next one of the same length
NUM_IGNORED_STEPS = 3  # steps after a change that say nothing: others were under way
FIRST_TRIAL_AFTER = 8  # steps at a length before another one is tried
MAX_PATIENCE, MAX_PATIENCE_S = 8192, 15.0  # steps, seconds; a try takes 11 steps where they are alike, a hopeless one 6
MAX_MIXED_STEPS = 3  # steps that did other work as well: after so many a try is put off, which is not judged by them
TOO_SLOW_FACTOR = (
    3  # times slower than the present, at best: two such steps end a try, whatever was under way before them
)
MIN_COOLDOWN, MAX_COOLDOWN = 8, 256  # times what a try lost: where steps with drafts are dear, few steps lose much
MAX_INHERITED_PATIENCE = (
    64  # steps; most that a regime begins with, where the one that it takes its length from knows more
)
MIN_GAIN = 1.03  # by so much the longer one of two lengths must be better


@dataclass(slots=True)
class Regime:
    """What is known for some number of running sequences."""

    length: int
    patience: int = FIRST_TRIAL_AFTER  # steps until the next try
    next_candidate: int = 0  # no drafts at all, longer ones and shorter ones in turn
    steps_waited: int = 0
    seconds_waited: float = 0.0
    cooldown: int = MIN_COOLDOWN  # times what a try lost that changed nothing
    cooldown_s: float = 0.0  # until the next try
    times: deque[StepTime] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))  # of steps at `length`
    evidence: dict[int, TrialEvidence] = field(default_factory=dict)  # of tries that changed nothing, by length


class DraftLengthTuner:
    """Told of every step; says how many drafts each sequence may have in the next."""

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        self._most = most
        self._fixed = fixed or most == 0
        self._ladder = sorted({0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, most} & set(range(most + 1)))
        self._regimes: dict[int, Regime] = {}  # by size class
        self._odds = AcceptanceRates(most)
        self._trial: LengthTrial | None = None
        self._size_class = -1
        self._num_sequences = -1  # that were last asked for, where nobody came in; they are of `_size_class`
        self._length = most
        self._num_to_ignore = 0

    def choose(self, num_sequences: int, num_new_seqs: int = 0) -> int:
        """Drafts per sequence for a step that so many sequences advance in. `num_new_seqs`: that come in just now: who
        knows what is good for all of them does not draft for the first few of a burst first."""
        if self._fixed or (num_sequences == self._num_sequences and not num_new_seqs):
            return self._length
        size_class, soon = self._class_of(num_sequences), self._class_of(num_sequences + num_new_seqs)
        if soon in self._regimes and self._regimes[soon].times:
            size_class = soon
        if size_class != self._size_class:
            self._enter_size_class(size_class)
        self._num_sequences = -1 if num_new_seqs else num_sequences
        return self._length

    def observe(self, num_sequences: int, length: int, seconds: float, *, alone: bool, drafted: bool) -> None:
        """A step with drafts of `length` took so long. `alone`: it did nothing else, and began when it could;
        `drafted`: somebody found something to draft."""
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
        """Of a step with drafts of `length`: how many were right, for each sequence."""
        self._odds.observe(accepted, length)
        if self._trial is not None and self._trial.length == length:
            self._trial.count_accepted(accepted)

    def observe_no_drafts(self, num_sequences: int, length: int) -> None:
        """The same of a step in which nobody found anything to draft."""
        self._odds.observe_no_drafts(num_sequences, length)
        if self._trial is not None and self._trial.length == length:
            self._trial.count_no_drafts(num_sequences)

    @property
    def awaits_trial_result(self) -> bool:
        """A try of which no step has returned yet, or one that was far too slow: no reason to order more than one."""
        return self._trial is not None and (self._trial.seconds == 0.0 or self._trial.was_too_slow)

    def _class_of(self, num_sequences: int) -> int:
        """The present one, if it will do."""
        least = 2.0 ** (self._size_class - 1) if self._size_class > 0 else 0.0
        if (1 - SIZE_CLASS_HYSTERESIS) * least <= num_sequences < (1 + SIZE_CLASS_HYSTERESIS) * 2 * least:
            return self._size_class
        return num_sequences.bit_length()

    def _enter_size_class(self, size_class: int) -> None:
        """Begins with what was best here; if nothing has been learned here, with what is best where it comes from."""
        regime = self._regimes.get(size_class)
        if regime is None or not regime.times:
            self._regimes[size_class] = self._first_regime(size_class)
        self._size_class = size_class
        self._set_length(self._regimes[size_class].length, None)

    def _first_regime(self, size_class: int) -> Regime:
        before = self._regimes.get(self._size_class)
        if before is None or size_class > self._size_class + 1:
            return Regime(self._most if size_class <= SMALL_BATCH.bit_length() else 0)
        patience = min(before.patience, MAX_INHERITED_PATIENCE)
        return Regime(before.length, patience, cooldown=before.cooldown, cooldown_s=max(0.0, before.cooldown_s))

    def _set_length(self, length: int, attempt: LengthTrial | None) -> None:
        changed = length != self._length
        self._length, self._trial = length, attempt
        self._num_to_ignore = NUM_IGNORED_STEPS if changed else self._num_to_ignore

    def _record_time(self, time: StepTime) -> None:
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
        """No drafts at all is asked first: under load that is the answer, and the way there by steps would be long, or
        barred where every length costs the same."""
        place = self._ladder.index(regime.length)
        around = [0, *(self._ladder[i] for i in (place + 1, place - 1, place + 2) if 0 <= i < len(self._ladder))]
        candidates = [length for length in dict.fromkeys(around) if length != regime.length]
        turn, regime.next_candidate = regime.next_candidate, regime.next_candidate + 1
        return candidates[turn % len(candidates)]

    def _judge(self, regime: Regime, attempt: LengthTrial) -> None:
        """Ends the try once it is sure what it is worth, or after MAX_SAMPLES: in doubt the shorter length stays,
        unless the longer one is likely to be better."""
        count, is_longer = len(attempt.times), attempt.length > regime.length
        wanted = self._current_speed(regime) * (MIN_GAIN if is_longer else 1 / MIN_GAIN)
        found = attempt.compare_with(wanted, regime.times, self._odds)
        found = found.combine(regime.evidence.get(attempt.length), EVIDENCE_DECAY)
        sure = abs(found.advantage) > CONFIDENCE_SIGMAS * found.error
        if count < (SAMPLES if sure else MAX_SAMPLES) and not (sure and found.advantage < 0):
            return
        if found.advantage < (found.error if is_longer else 0.0):
            regime.evidence[attempt.length] = found
            self._reject(regime, attempt, 2 if count >= SAMPLES else 4)
        else:
            self._adopt(regime, attempt)

    def _adopt(self, regime: Regime, attempt: LengthTrial) -> None:
        """What was tried stays."""
        regime.length, regime.patience = attempt.length, max(FIRST_TRIAL_AFTER, regime.patience // 4)
        regime.cooldown, regime.cooldown_s = max(MIN_COOLDOWN, regime.cooldown // 4), 0.0
        regime.times = deque(attempt.times, maxlen=regime.times.maxlen)
        regime.evidence = {}
        self._set_length(regime.length, None)

    def _ends_trial(self, attempt: LengthTrial, seconds: float, *, alone: bool, drafted: bool) -> bool:
        """Whether the try ends with this step, before it has been long enough to be judged."""
        regime = self._regimes[self._size_class]
        if not alone:
            attempt.num_mixed += 1
        elif drafted:
            attempt.was_too_slow = (1 + attempt.length) * TOO_SLOW_FACTOR < self._current_speed(regime) * seconds
            attempt.num_too_slow += attempt.was_too_slow
        if attempt.num_too_slow == 2:
            attempt.times.append((seconds, True))
            self._reject(regime, attempt, 4)
        elif attempt.num_mixed == MAX_MIXED_STEPS:
            self._postpone(regime, attempt)
        return self._trial is not attempt

    def _reject(self, regime: Regime, attempt: LengthTrial, factor: int) -> None:
        """Back to where it was, for longer."""
        regime.patience = min(factor * regime.patience, MAX_PATIENCE)
        regime.cooldown = min(factor * regime.cooldown, MAX_COOLDOWN)
        lost = 1 - attempt.speed(self._odds) / self._current_speed(regime)
        regime.cooldown_s = regime.cooldown * attempt.seconds * max(lost, 0.0)
        self._set_length(regime.length, None)

    def _postpone(self, regime: Regime, attempt: LengthTrial) -> None:
        """The same where nothing is known of what it lost."""
        regime.patience = min(2 * regime.patience, MAX_PATIENCE)
        regime.cooldown_s = MIN_COOLDOWN * attempt.seconds
        self._set_length(regime.length, None)

    def _current_speed(self, regime: Regime) -> float:
        """Tokens per second and sequence."""
        return self._odds.tokens(regime.length) / typical(regime.times)
