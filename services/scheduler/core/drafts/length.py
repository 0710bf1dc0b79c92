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

from quire.services.scheduler.core.drafts.odds import DraftOdds
from quire.services.scheduler.core.drafts.trial import Evidence, StepTime, Try, typical

FEW = 7  # sequences for which drafts may be long before anything is known
OVERLAP = 0.25  # by so much the number of sequences may leave its power of two before another length goes
LEAST_SAMPLES = 3  # steps after which a try may be given up
SAMPLES, MOST_SAMPLES = 8, 32  # after which it may succeed, and in which it must
SURE = 2.0  # standard errors
KEPT = 0.5  # of what a try has shown, for the next one of the same length
UNSETTLED = 3  # steps after a change that say nothing: others were under way
FIRST_TRY = 8  # steps at a length before another one is tried
RAREST_TRY, RAREST_TRY_S = 8192, 15.0  # steps, seconds; a try takes 11 steps where they are alike, a hopeless one 6
MIXED = 3  # steps that did other work as well: after so many a try is put off, which is not judged by them
FAR_OFF = 3  # times slower than the present, at best: two such steps end a try, whatever was under way before them
FIRST_REST, LONGEST_REST = 8, 256  # times what a try lost: where steps with drafts are dear, few steps lose much
LEARNED_PATIENCE = 64  # steps; most that a regime begins with, where the one that it takes its length from knows more
BETTER = 1.03  # by so much the longer one of two lengths must be better


@dataclass(slots=True)
class Regime:
    """What is known for some number of running sequences."""

    length: int
    patience: int = FIRST_TRY  # steps until the next try
    next_try: int = 0  # no drafts at all, longer ones and shorter ones in turn
    waited: int = 0
    waited_s: float = 0.0
    rest: int = FIRST_REST  # times what a try lost that changed nothing
    rest_s: float = 0.0  # until the next try
    times: deque[StepTime] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))  # of steps at `length`
    evidence: dict[int, Evidence] = field(default_factory=dict)  # of tries that changed nothing, by length


class DraftLength:
    """Told of every step; says how many drafts each sequence may have in the next."""

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        self._most = most
        self._fixed = fixed or most == 0
        self._ladder = sorted({0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, most} & set(range(most + 1)))
        self._regimes: dict[int, Regime] = {}  # by size class
        self._odds = DraftOdds(most)
        self._try: Try | None = None
        self._size_class = -1
        self._num_sequences = -1  # that were last asked for, where nobody came in; they are of `_size_class`
        self._length = most
        self._unsettled = 0

    def choose(self, num_sequences: int, num_entering: int = 0) -> int:
        """Drafts per sequence for a step that so many sequences advance in. `num_entering`: that come in just now: who
        knows what is good for all of them does not draft for the first few of a burst first."""
        if self._fixed or (num_sequences == self._num_sequences and not num_entering):
            return self._length
        size_class, soon = self._class_of(num_sequences), self._class_of(num_sequences + num_entering)
        if soon in self._regimes and self._regimes[soon].times:
            size_class = soon
        if size_class != self._size_class:
            self._enter(size_class)
        self._num_sequences = -1 if num_entering else num_sequences
        return self._length

    def learn(self, num_sequences: int, length: int, seconds: float, *, alone: bool, drafted: bool) -> None:
        """A step with drafts of `length` took so long. `alone`: it did nothing else, and began when it could;
        `drafted`: somebody found something to draft."""
        if self._fixed or length != self._length:
            return
        if num_sequences != self._num_sequences and self._class_of(num_sequences) != self._size_class:
            return
        if self._try is not None:
            self._try.seconds += seconds
            if self._is_over(self._try, seconds, alone=alone, drafted=drafted):
                return
        if self._unsettled > 0:
            self._unsettled -= 1
        elif alone and seconds > 0:
            self._take_time((seconds, drafted))

    def learn_right(self, accepted: npt.NDArray[np.int64], length: int) -> None:
        """Of a step with drafts of `length`: how many were right, for each sequence."""
        self._odds.learn(accepted, length)
        if self._try is not None and self._try.length == length:
            self._try.count(accepted)

    def learn_nothing_drafted(self, num_sequences: int, length: int) -> None:
        """The same of a step in which nobody found anything to draft."""
        self._odds.learn_nothing_drafted(num_sequences, length)
        if self._try is not None and self._try.length == length:
            self._try.count_nothing(num_sequences)

    @property
    def in_doubt(self) -> bool:
        """A try of which no step has returned yet, or one that was far too slow: no reason to order more than one."""
        return self._try is not None and (self._try.seconds == 0.0 or self._try.was_far_off)

    def _class_of(self, num_sequences: int) -> int:
        """The present one, if it will do."""
        least = 2.0 ** (self._size_class - 1) if self._size_class > 0 else 0.0
        if (1 - OVERLAP) * least <= num_sequences < (1 + OVERLAP) * 2 * least:
            return self._size_class
        return num_sequences.bit_length()

    def _enter(self, size_class: int) -> None:
        """Begins with what was best here; if nothing has been learned here, with what is best where it comes from."""
        regime = self._regimes.get(size_class)
        if regime is None or not regime.times:
            self._regimes[size_class] = self._first_regime(size_class)
        self._size_class = size_class
        self._begin(self._regimes[size_class].length, None)

    def _first_regime(self, size_class: int) -> Regime:
        before = self._regimes.get(self._size_class)
        if before is None or size_class > self._size_class + 1:
            return Regime(self._most if size_class <= FEW.bit_length() else 0)
        patience = min(before.patience, LEARNED_PATIENCE)
        return Regime(before.length, patience, rest=before.rest, rest_s=max(0.0, before.rest_s))

    def _begin(self, length: int, attempt: Try | None) -> None:
        changed = length != self._length
        self._length, self._try = length, attempt
        self._unsettled = UNSETTLED if changed else self._unsettled

    def _take_time(self, time: StepTime) -> None:
        regime = self._regimes[self._size_class]
        if self._try is not None:
            self._try.times.append(time)
            if len(self._try.times) >= LEAST_SAMPLES:
                self._weigh(regime, self._try)
            return
        regime.times.append(time)
        regime.waited += 1
        regime.waited_s += time[0]
        regime.rest_s -= time[0]
        is_due = regime.waited >= regime.patience or regime.waited_s >= RAREST_TRY_S
        if is_due and regime.rest_s <= 0 and len(regime.times) >= SAMPLES:
            self._attempt(regime)

    def _attempt(self, regime: Regime) -> None:
        regime.waited, regime.waited_s = 0, 0.0
        length = self._candidate(regime)
        self._begin(length, Try(length))

    def _candidate(self, regime: Regime) -> int:
        """No drafts at all is asked first: under load that is the answer, and the way there by steps would be long, or
        barred where every length costs the same."""
        place = self._ladder.index(regime.length)
        around = [0, *(self._ladder[i] for i in (place + 1, place - 1, place + 2) if 0 <= i < len(self._ladder))]
        candidates = [length for length in dict.fromkeys(around) if length != regime.length]
        turn, regime.next_try = regime.next_try, regime.next_try + 1
        return candidates[turn % len(candidates)]

    def _weigh(self, regime: Regime, attempt: Try) -> None:
        """Ends the try once it is sure what it is worth, or after MOST_SAMPLES: in doubt the shorter length stays,
        unless the longer one is likely to be better."""
        count, is_longer = len(attempt.times), attempt.length > regime.length
        wanted = self._present_speed(regime) * (BETTER if is_longer else 1 / BETTER)
        found = attempt.against(wanted, regime.times, self._odds)
        found = found.together(regime.evidence.get(attempt.length), KEPT)
        sure = abs(found.advantage) > SURE * found.error
        if count < (SAMPLES if sure else MOST_SAMPLES) and not (sure and found.advantage < 0):
            return
        if found.advantage < (found.error if is_longer else 0.0):
            regime.evidence[attempt.length] = found
            self._give_up(regime, attempt, 2 if count >= SAMPLES else 4)
        else:
            self._adopt(regime, attempt)

    def _adopt(self, regime: Regime, attempt: Try) -> None:
        """What was tried stays."""
        regime.length, regime.patience = attempt.length, max(FIRST_TRY, regime.patience // 4)
        regime.rest, regime.rest_s = max(FIRST_REST, regime.rest // 4), 0.0
        regime.times = deque(attempt.times, maxlen=regime.times.maxlen)
        regime.evidence = {}
        self._begin(regime.length, None)

    def _is_over(self, attempt: Try, seconds: float, *, alone: bool, drafted: bool) -> bool:
        """Whether the try ends with this step, before it has been long enough to be judged."""
        regime = self._regimes[self._size_class]
        if not alone:
            attempt.num_mixed += 1
        elif drafted:
            attempt.was_far_off = (1 + attempt.length) * FAR_OFF < self._present_speed(regime) * seconds
            attempt.num_far_off += attempt.was_far_off
        if attempt.num_far_off == 2:
            attempt.times.append((seconds, True))
            self._give_up(regime, attempt, 4)
        elif attempt.num_mixed == MIXED:
            self._put_off(regime, attempt)
        return self._try is not attempt

    def _give_up(self, regime: Regime, attempt: Try, factor: int) -> None:
        """Back to where it was, for longer."""
        regime.patience = min(factor * regime.patience, RAREST_TRY)
        regime.rest = min(factor * regime.rest, LONGEST_REST)
        lost = 1 - attempt.speed(self._odds) / self._present_speed(regime)
        regime.rest_s = regime.rest * attempt.seconds * max(lost, 0.0)
        self._begin(regime.length, None)

    def _put_off(self, regime: Regime, attempt: Try) -> None:
        """The same where nothing is known of what it lost."""
        regime.patience = min(2 * regime.patience, RAREST_TRY)
        regime.rest_s = FIRST_REST * attempt.seconds
        self._begin(regime.length, None)

    def _present_speed(self, regime: Regime) -> float:
        """Tokens per second and sequence."""
        return self._odds.tokens(regime.length) / typical(regime.times)
