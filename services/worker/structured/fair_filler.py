"""Fills masks of many sequences within a time budget per step that tenants share: sequences whose masks exceed it are
ended, so that all others continue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from quire.services.worker.structured.backends.vocabulary import MASK_BITS
from quire.services.worker.structured.port import MaskFiller, Matcher
from quire.services.worker.structured.slow_tenants import SlowTenants
from quire.shared.columns import I32

MAX_STEPS_OVER_SHARE = 3  # consecutive steps in which a tenant may exceed its share
STEP_BUDGET_S = 0.01  # CPU seconds per step for all sequences of noticeable cost; tenants share it
# Average time of a token and its mask from which a sequence counts against the budget. Usual grammars take 0.02 to
# 0.6 ms with 150,000 tokens, and 0.02 to 0.1 ms with a few thousand.
NOTICEABLE_S, LEAST_NOTICEABLE_S = 0.001, 0.0004
NOTICEABLE_VOCABULARY = 150_000  # tokens to which NOTICEABLE_S applies; in proportion for smaller vocabularies
SMOOTHING = 4  # tokens in the moving average: an ambiguous grammar doubles its time within a dozen tokens
SLOW_TOKEN_S = 0.001  # average time above which a sequence's tokens count as slow
USUAL_TOKEN_S = 20e-6  # upper bound of the usual time per token
MIN_SLOW_TOTAL_S = 0.5  # total time before a sequence's pace is judged


class MaskedSequence(Protocol):
    """Sequence that needs masks, as FairFiller sees it: matcher, tenant, and costs, which FairFiller updates."""

    matcher: Matcher
    tenant: str
    advance_alone: bool  # its tokens are consumed and timed separately
    fill_alone: bool  # its masks are filled and timed separately
    token_s: float  # time of its last token, if timed separately
    cost_s: float  # average time of a token and a mask

    def fail_as_too_slow(self, text: str) -> None:
        """Fails the sequence, and records its grammar as slow."""


class TokenPace:
    """Total time and number of a sequence's tokens that were timed. A moved sequence may bring many tokens at once,
    which must not delay the others."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_tokens = 0

    def add(self, seconds: float) -> None:
        self._seconds += seconds
        self._num_tokens += 1

    @property
    def is_slow(self) -> bool:
        """Whether the tokens took more than MIN_SLOW_TOTAL_S in all and SLOW_TOKEN_S each on average."""
        return self._seconds > MIN_SLOW_TOTAL_S and self._seconds > SLOW_TOKEN_S * self._num_tokens

    def __str__(self) -> str:
        return f"{self._num_tokens} tokens took {self._seconds:.1f} s"


Row = tuple[MaskedSequence, int]  # with the index of its mask
Costs = dict[str, list[MaskedSequence]]  # sequences of noticeable cost, by tenant


class FairFiller:
    """Fills masks and times all sequences together; while a step takes long, times each one separately by CPU time and
    ends those that exceed their tenant's share."""

    def __init__(self, filler: MaskFiller) -> None:
        self._filler = filler
        self._tenants = SlowTenants(STEP_BUDGET_S)
        self._num_over: dict[str, int] = {}  # consecutive steps over its share, by tenant

    def accept(self, sequences: Sequence[MaskedSequence], token_ids: Sequence[int]) -> list[bool]:
        """Advances each sequence by a token; returns False for those whose grammar does not allow it. If the batch
        takes as long as a slow token, each sequence advances alone next time."""
        began = time.perf_counter()
        accepted = self._filler.accept([sequence.matcher for sequence in sequences], token_ids)
        if time.perf_counter() - began > SLOW_TOKEN_S + USUAL_TOKEN_S * len(sequences):
            for sequence in sequences:
                sequence.advance_alone = True  # for one step: a fast sequence leaves this mode again
        return accepted

    def fill(self, sequences: Sequence[MaskedSequence], places: Sequence[int], masks: I32) -> None:
        """Fills masks[places[i]] of sequences[i], those of noticeable cost one by one, and ends the most expensive ones
        of tenants that keep exceeding their share of the step's time."""
        together: list[Row] = []
        alone: list[Row] = []
        for row in zip(sequences, places, strict=True):
            (alone if row[0].fill_alone else together).append(row)
        if len(together) > 1:
            self._fill_together(together, masks)
        else:
            alone += together
        limit_s = noticeable_s(masks.shape[1] * MASK_BITS)
        for sequence, place in alone:
            began = time.thread_time()
            self._filler.fill([sequence.matcher], [place], masks)
            _update_cost(sequence, time.thread_time() - began, limit_s)
        self._enforce_budget([sequence for sequence, _ in alone if sequence.cost_s > limit_s])
        self._tenants.count_masks(sequence.tenant for sequence in sequences)

    def _fill_together(self, rows: Sequence[Row], masks: I32) -> None:
        """Fills the masks in one call; if that exceeds the step's budget, each sequence is filled and timed alone next
        time."""
        began = time.perf_counter()
        self._filler.fill([sequence.matcher for sequence, _ in rows], [place for _, place in rows], masks)
        if time.perf_counter() - began > STEP_BUDGET_S:
            for sequence, _ in rows:
                sequence.fill_alone = True  # for one step: a fast sequence leaves this mode again

    def _enforce_budget(self, sequences: Sequence[MaskedSequence]) -> None:
        """Ends the most expensive sequences of a tenant that exceeded its share in MAX_STEPS_OVER_SHARE consecutive
        steps, until the rest is within it, and adds a strike to the tenant. `sequences`: those of noticeable cost."""
        slow: Costs = {}
        for sequence in sequences:
            slow.setdefault(sequence.tenant, []).append(sequence)
        shares = self._tenants.shares({tenant: _total(mine) for tenant, mine in slow.items()})
        over = [tenant for tenant, mine in slow.items() if _total(mine) > shares[tenant]]
        self._num_over = {tenant: self._num_over.get(tenant, 0) + 1 for tenant in over}
        for tenant in over:
            if self._num_over[tenant] >= MAX_STEPS_OVER_SHARE:
                self._tenants.add_strike(tenant)
                self._end_most_expensive(slow[tenant], shares[tenant])

    def _end_most_expensive(self, sequences: Sequence[MaskedSequence], share_s: float) -> None:
        """Fails sequences as too slow, the most expensive first, until the remaining ones cost at most `share_s` per
        step."""
        total = remaining = _total(sequences)
        for sequence in sorted(sequences, key=lambda one: one.cost_s, reverse=True):
            if remaining <= share_s:
                break
            remaining -= sequence.cost_s
            sequence.fail_as_too_slow(
                f"a token takes {sequence.cost_s * 1e3:.0f} ms and all slow grammars of the tenant "
                f"{total * 1e3:.0f} in a step, which may take {share_s * 1e3:.0f}; make the grammar unambiguous, or "
                "send fewer requests at a time"
            )


def _total(sequences: Sequence[MaskedSequence]) -> float:
    """Returns the seconds per step that these sequences cost together, on average."""
    return sum(sequence.cost_s for sequence in sequences)


def noticeable_s(vocab_size: int) -> float:
    """Returns the average time of a token and its mask from which a sequence counts as slow: the larger the vocabulary,
    the longer a usual mask takes."""
    return max(LEAST_NOTICEABLE_S, min(1.0, vocab_size / NOTICEABLE_VOCABULARY) * NOTICEABLE_S)


def _update_cost(sequence: MaskedSequence, seconds: float, limit_s: float) -> None:
    """Adds the time of a mask and of its token to the sequence's moving average; a cost above `limit_s` keeps it timed
    alone."""
    cost_s = seconds + sequence.token_s
    sequence.cost_s += (cost_s - sequence.cost_s) / SMOOTHING if sequence.cost_s else cost_s
    sequence.fill_alone = max(seconds, sequence.cost_s) > limit_s
