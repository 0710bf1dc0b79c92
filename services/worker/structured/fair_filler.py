"""Masks for many sequences at a time, within a budget of a step that tenants share: the sequences whose masks use it up
are ended, so that all others go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from quire.services.worker.structured.port import MaskFiller, Matcher
from quire.services.worker.structured.slow_tenants import SlowTenants
from quire.shared.columns import I32

MAX_STEPS_OVER_SHARE = 3  # steps in a row that a tenant is over its share
STEP_BUDGET_S = 0.01  # of a core, for all sequences of a step whose cost is noticeable; tenants share it
NOTICEABLE_S = 0.001  # a token and the mask after it, on average; what people write takes 0.02 to 0.6 ms
SMOOTHING = 8  # tokens that the average is over, about
SLOW_TOKEN_S = 0.001  # on average
USUAL_TOKEN_S = 20e-6  # at most
MIN_SLOW_TOTAL_S = 0.5


class MaskedSequence(Protocol):
    """A sequence that needs masks."""

    matcher: Matcher
    tenant: str
    advance_alone: bool  # its tokens are taken, and timed, alone
    fill_alone: bool  # its masks are made, and timed, alone
    token_s: float  # what its last token took, where it was timed alone
    cost_s: float  # of a token and a mask, on average

    def fail_as_too_slow(self, text: str) -> None:
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
        return self._seconds > MIN_SLOW_TOTAL_S and self._seconds > SLOW_TOKEN_S * self._num_tokens

    def __str__(self) -> str:
        return f"{self._num_tokens} tokens took {self._seconds:.1f} s"


Row = tuple[MaskedSequence, int]  # and where its mask goes
Costs = dict[str, list[MaskedSequence]]  # sequences whose cost is noticeable, by tenant


class FairFiller:
    """Times all sequences together, and each alone while a step takes long: by the time of the processor."""

    def __init__(self, filler: MaskFiller) -> None:
        self._filler = filler
        self._tenants = SlowTenants(STEP_BUDGET_S)
        self._num_over: dict[str, int] = {}  # steps in a row over its tenant's share, by tenant

    def accept(self, sequences: Sequence[MaskedSequence], token_ids: Sequence[int]) -> list[bool]:
        """A token each. Where all together take as long as a slow one, each takes its next by itself."""
        began = time.perf_counter()
        accepted = self._filler.accept([sequence.matcher for sequence in sequences], token_ids)
        if time.perf_counter() - began > SLOW_TOKEN_S + USUAL_TOKEN_S * len(sequences):
            for sequence in sequences:
                sequence.advance_alone = True  # once: a sequence that was fast then stays so
        return accepted

    def fill(self, sequences: Sequence[MaskedSequence], places: Sequence[int], masks: I32) -> None:
        together: list[Row] = []
        alone: list[Row] = []
        for row in zip(sequences, places, strict=True):
            (alone if row[0].fill_alone else together).append(row)
        if len(together) > 1:
            self._fill_together(together, masks)
        else:
            alone += together
        for sequence, place in alone:
            began = time.thread_time()
            self._filler.fill([sequence.matcher], [place], masks)
            _update_cost(sequence, time.thread_time() - began)
        self._enforce_budget([sequence for sequence, _ in alone])
        self._tenants.count_masks(sequence.tenant for sequence in sequences)

    def _fill_together(self, rows: Sequence[Row], masks: I32) -> None:
        began = time.perf_counter()
        self._filler.fill([sequence.matcher for sequence, _ in rows], [place for _, place in rows], masks)
        if time.perf_counter() - began > STEP_BUDGET_S:
            for sequence, _ in rows:
                sequence.fill_alone = True  # once: a sequence that was fast then is not filled alone again

    def _enforce_budget(self, sequences: Sequence[MaskedSequence]) -> None:
        """Ends the most expensive sequences of a tenant that was over its share in some steps in a row, until the rest
        is within it."""
        slow: Costs = {}
        for sequence in sequences:
            if sequence.cost_s > NOTICEABLE_S:
                slow.setdefault(sequence.tenant, []).append(sequence)
        shares = self._tenants.shares({tenant: _total(mine) for tenant, mine in slow.items()})
        over = [tenant for tenant, mine in slow.items() if _total(mine) > shares[tenant]]
        self._num_over = {tenant: self._num_over.get(tenant, 0) + 1 for tenant in over}
        for tenant in over:
            if self._num_over[tenant] >= MAX_STEPS_OVER_SHARE:
                self._tenants.add_strike(tenant)
                self._end_most_expensive(slow[tenant], shares[tenant])

    def _end_most_expensive(self, sequences: Sequence[MaskedSequence], share_s: float) -> None:
        total = left = _total(sequences)
        for sequence in sorted(sequences, key=lambda one: one.cost_s, reverse=True):
            if left <= share_s:
                break
            left -= sequence.cost_s
            sequence.fail_as_too_slow(
                f"a token takes {sequence.cost_s * 1e3:.0f} ms and all slow grammars of the tenant "
                f"{total * 1e3:.0f} in a step; at most {share_s * 1e3:.0f} are given to them; make it unambiguous, or "
                "send fewer at a time"
            )


def _total(sequences: Sequence[MaskedSequence]) -> float:
    return sum(sequence.cost_s for sequence in sequences)


def _update_cost(sequence: MaskedSequence, seconds: float) -> None:
    cost_s = seconds + sequence.token_s
    sequence.cost_s += (cost_s - sequence.cost_s) / SMOOTHING if sequence.cost_s else cost_s
    sequence.fill_alone = max(seconds, sequence.cost_s) > NOTICEABLE_S
