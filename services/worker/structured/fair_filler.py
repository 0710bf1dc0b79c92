"""Masks for many sequences at a time, within a budget of a step: the sequences whose masks use it up are ended, so that
all others go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from services.worker.structured.port import MaskFiller, Matcher
from shared.columns import I32

SLOW_S = 0.05  # a mask over 150,000 tokens takes 0.1 ms, the slowest of what people write 2 ms
MOST_SLOW = 3  # in a row
STEP_BUDGET_S = 0.01  # of a core, for all sequences of a step whose cost is noticeable
NOTICEABLE_S = 0.001  # a token and the mask after it, on average; what people write takes 0.02 to 0.6 ms
SMOOTHING = 8  # tokens that the average is over, about
SLOW_TOKEN_S = 0.001  # on average
USUAL_TOKEN_S = 20e-6  # at most
NOTICED_S = 0.5


class Filled(Protocol):
    """A sequence that needs masks."""

    matcher: Matcher
    takes_long: bool  # its tokens are taken, and timed, alone
    watched: bool  # its masks are made, and timed, alone
    num_slow: int  # in a row
    token_s: float  # what its last token took, where it was timed alone
    cost_s: float  # of a token and a mask, on average

    def end_slow(self, text: str) -> None:
        """Fails it, and lets its grammar be remembered."""


class TokenPace:
    """How fast a sequence goes on by its tokens: where one that moves brings many, these must not hold up others."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_tokens = 0

    def add(self, seconds: float) -> None:
        self._seconds += seconds
        self._num_tokens += 1

    @property
    def is_slow(self) -> bool:
        return self._seconds > NOTICED_S and self._seconds > SLOW_TOKEN_S * self._num_tokens

    def __str__(self) -> str:
        return f"{self._num_tokens} tokens took {self._seconds:.1f} s"


Row = tuple[Filled, int]  # and where its mask goes
Cost = tuple[float, Filled]  # seconds of a step


class FairFiller:
    """Times all sequences together, and each alone while a step takes long: by the time of the processor."""

    def __init__(self, filler: MaskFiller) -> None:
        self._filler = filler
        self._num_over = 0  # steps in a row over the budget

    def accept(self, sequences: Sequence[Filled], token_ids: Sequence[int]) -> list[bool]:
        """A token each. Where all together take as long as a slow one, each takes its next by itself."""
        began = time.perf_counter()
        accepted = self._filler.accept([sequence.matcher for sequence in sequences], token_ids)
        if time.perf_counter() - began > SLOW_TOKEN_S + USUAL_TOKEN_S * len(sequences):
            for sequence in sequences:
                sequence.takes_long = True  # once: a sequence that was fast then stays so
        return accepted

    def fill(self, sequences: Sequence[Filled], places: Sequence[int], masks: I32) -> None:
        together: list[Row] = []
        alone: list[Row] = []
        for row in zip(sequences, places, strict=True):
            (alone if row[0].watched else together).append(row)
        if len(together) > 1:
            self._fill_together(together, masks)
        else:
            alone += together
        costs: list[Cost] = []
        for sequence, place in alone:
            began = time.thread_time()
            self._filler.fill([sequence.matcher], [place], masks)
            seconds = time.thread_time() - began
            _judge(sequence, seconds)
            if sequence.cost_s > NOTICEABLE_S:
                costs.append((sequence.cost_s, sequence))
        self._keep_budget(costs)

    def _fill_together(self, rows: Sequence[Row], masks: I32) -> None:
        began = time.perf_counter()
        self._filler.fill([sequence.matcher for sequence, _ in rows], [place for _, place in rows], masks)
        if time.perf_counter() - began > STEP_BUDGET_S:
            for sequence, _ in rows:
                sequence.watched = True  # once: a sequence that was fast then is not watched again

    def _keep_budget(self, costs: list[Cost]) -> None:
        """Ends the most expensive sequences of some steps in a row that were over the budget, until the rest is
        within it. One alone is bounded by SLOW_S."""
        total = sum(seconds for seconds, _ in costs)
        self._num_over = self._num_over + 1 if total > STEP_BUDGET_S and len(costs) > 1 else 0
        if self._num_over < MOST_SLOW:
            return
        left = total
        for seconds, sequence in sorted(costs, key=lambda cost: cost[0], reverse=True)[:-1]:
            if left <= STEP_BUDGET_S:
                break
            left -= seconds
            sequence.end_slow(
                f"a token takes {seconds * 1e3:.0f} ms and all slow grammars of a step "
                f"{total * 1e3:.0f}; at most {STEP_BUDGET_S * 1e3:.0f} are given to them"
            )


def _judge(sequence: Filled, seconds: float) -> None:
    cost_s = seconds + sequence.token_s
    sequence.cost_s += (cost_s - sequence.cost_s) / SMOOTHING if sequence.cost_s else cost_s
    sequence.watched = max(seconds, sequence.cost_s) > NOTICEABLE_S
    sequence.num_slow = sequence.num_slow + 1 if seconds > SLOW_S else 0
    if sequence.num_slow >= MOST_SLOW:
        sequence.end_slow(f"its last mask took {seconds * 1e3:.0f} ms")
