"""Masks for many sequences at a time, and an end for the one whose masks take so long that all others wait for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from services.worker.structured.port import MaskFiller, Matcher
from shared.columns import I32

SLOW_S = 0.05  # a mask over 150,000 tokens takes 0.1 ms, the slowest of what people write 2 ms
MOST_SLOW = 3  # in a row
SLOW_TOKEN_S = 0.001  # on average
USUAL_TOKEN_S = 20e-6  # at most
NOTICED_S = 0.5


class Filled(Protocol):
    """A sequence that needs masks."""

    matcher: Matcher
    takes_long: bool  # its tokens are taken, and timed, alone
    watched: bool  # its masks are made, and timed, alone
    num_slow: int  # in a row

    def fail(self, text: str) -> None: ...


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


class FairFiller:
    """Times all together, and who may be the slow one alone: by the processor's time, not the clock's."""

    def __init__(self, filler: MaskFiller) -> None:
        self._filler = filler

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
        for sequence, place in alone:
            began = time.thread_time()
            self._filler.fill([sequence.matcher], [place], masks)
            _judge(sequence, time.thread_time() - began)

    def _fill_together(self, rows: Sequence[Row], masks: I32) -> None:
        began = time.perf_counter()
        self._filler.fill([sequence.matcher for sequence, _ in rows], [place for _, place in rows], masks)
        if time.perf_counter() - began > SLOW_S:
            for sequence, _ in rows:
                sequence.watched = True  # once: a sequence that was fast then is not watched again


def _judge(sequence: Filled, seconds: float) -> None:
    sequence.watched = seconds > SLOW_S
    sequence.num_slow = sequence.num_slow + 1 if sequence.watched else 0
    if sequence.num_slow >= MOST_SLOW:
        sequence.fail(f"the grammar is too slow: its last mask took {seconds * 1e3:.0f} ms")
