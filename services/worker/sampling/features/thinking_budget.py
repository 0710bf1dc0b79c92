"""thinking_token_budget: forces the end of a reasoning section once it has used its token budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions, check_token_ids, rows_by_slot
from quire.services.worker.sampling.features.output_tails import OutputTails, shifted
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared import columns
from quire.shared.columns import I32

OUTSIDE = -1  # count of a slot that is not in a reasoning section
ANY = -1  # in a pattern: matches every token
FORCED_LOGIT = 1e5  # exceeds all other logits by more than temperature or noise can compensate


@dataclass(frozen=True, slots=True)
class ReasoningSection:
    """Token budget of a slot's reasoning, and the token ids of the markers that start and end it."""

    budget: int
    start: I32
    end: I32
    has_grammar: bool  # a grammar is applied later, and may not allow the end marker


class ThinkingBudget:
    """Sampling feature that counts the tokens of open reasoning sections on the device, int32 [num_slots]; OUTSIDE
    where none is open."""

    parameters = frozenset({"thinking_token_budget"})

    def __init__(self, num_slots: int, shard: VocabShard, device: torch.device) -> None:
        self.shard = shard
        self._device = device
        self._sections: dict[int, ReasoningSection] = {}
        self.tails = OutputTails(num_slots, device)
        self.counts: Tensor = torch.full((num_slots,), OUTSIDE, dtype=torch.int32, device=device)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores budget and markers of the slot, and counts a section that its tokens so far, prompt included, leave
        open; does nothing without a budget. Raises InvalidArgument for a marker id outside of the vocabulary."""
        if not admission.sampling.HasField("thinking_token_budget"):
            return
        start, end = columns.i32(admission.think_start_token_ids), columns.i32(admission.think_end_token_ids)
        check_token_ids(np.concatenate((start, end)), self.shard.vocab_size, "thinking_token_budget")
        tokens = columns.i32(admission.token_ids)
        budget, has_grammar = admission.sampling.thinking_token_budget, bool(admission.grammar_id)
        self._sections[slot] = ReasoningSection(budget, start, end, has_grammar)
        self.tails.start_slot(slot, tokens, max(len(start), len(end)))
        self.counts[slot] = _num_open_tokens(tokens, start, end)

    def release(self, slot: int) -> None:
        self._sections.pop(slot, None)

    def bind(self, slots: Rows) -> BoundThinkingBudget | None:
        """Prepares the rows of slots with a budget; None if there are none."""
        if not self._sections:
            return None
        active = {row: self._sections[slot] for row, slot in enumerate(slots.tolist()) if slot in self._sections}
        if not active:
            return None
        return BoundThinkingBudget(self, np.array(list(active)), slots, list(active.values()), self._device)


class BoundThinkingBudget:
    """Budgets and marker patterns of the rows that have some; patterns are right-aligned with the tails, [num_active,
    width], and padded with ANY on the left."""

    def __init__(
        self, owner: ThinkingBudget, rows: Rows, slots: Rows, sections: list[ReasoningSection], device: torch.device
    ) -> None:
        self._owner = owner
        width = owner.tails.width
        own_slots, own_rows = rows_by_slot(rows, slots[rows])
        first_of = np.searchsorted(rows, own_rows[:, 0])  # each slot's first row, as index into the active rows
        longest = max(len(section.end) for section in sections)
        prefixes = [[_right_aligned(s.end[:length], width) for length in range(longest)] for s in sections]
        nexts = np.zeros((len(sections), longest), dtype=np.int64)
        for i, section in enumerate(sections):
            nexts[i, : len(section.end)] = section.end
        (
            self._rows, self._slots, self._own_slots, self._own_rows, self._first_of,
            self._budgets, self._starts, self._ends, self._prefixes, self._nexts, self._lengths, self._have_grammar,
        ) = (
            upload(values, device)
            for values in (
                rows, slots[rows], own_slots, own_rows, first_of,
                [s.budget for s in sections],
                np.array([_right_aligned(s.start, width) for s in sections]),
                np.array([_right_aligned(s.end, width) for s in sections]),
                np.array(prefixes),
                nexts,
                [len(s.end) for s in sections],
                [[s.has_grammar] for s in sections],
            )
        )  # fmt: skip

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Forces the next token of the end marker, in place, in rows whose section has used its budget: bans all
        others, or under a grammar raises that token's logit to FORCED_LOGIT, so that the grammar may still ban it."""
        counts, tails = self._owner.counts[self._slots], self._owner.tails.tokens[self._slots]
        if positions.drafts is not None:
            counts, tails = self._advance(counts, tails, positions.drafts[self._rows], slice(None))
        exhausted = (counts >= self._budgets).unsqueeze(1)
        end_columns, is_local = self._owner.shard.local_columns(self._next_of_end(tails).unsqueeze(1))
        rows = logits[self._rows]
        kept = rows.gather(1, end_columns)
        kept = torch.where(exhausted & ~torch.isfinite(kept), 0, kept)  # even if another feature bans it
        kept = torch.where(exhausted & self._have_grammar, FORCED_LOGIT, kept)
        others = rows.masked_fill(exhausted & ~self._have_grammar, float("-inf"))
        logits[self._rows] = others.scatter(1, end_columns, kept.where(is_local, others.gather(1, end_columns)))

    def sampled(self, token_ids: Tensor) -> None:
        """Advances the counts and tails of the slots by the rows' new tokens; a start marker opens a section, an end
        marker closes it."""
        owner, slots = self._owner, self._own_slots
        new = token_ids[self._own_rows].to(torch.int32).masked_fill(self._own_rows < 0, -1)
        state = self._advance(owner.counts[slots], owner.tails.tokens[slots], new, self._first_of)
        owner.counts[slots], owner.tails.tokens[slots] = state

    def _advance(self, counts: Tensor, tails: Tensor, new: Tensor, which: Any) -> tuple[Tensor, Tensor]:
        """Returns counts and tails after the tokens of `new` [n, max_new], -1 for none; stores nothing. `which`:
        indices of the active rows that the arguments belong to."""
        starts, ends = self._starts[which], self._ends[which]
        for column in new.unbind(1):
            tails = shifted(tails, column.unsqueeze(1))
            outside = _matches(tails, starts).int() + OUTSIDE
            moved = torch.where(counts == OUTSIDE, outside, counts + 1).masked_fill(_matches(tails, ends), OUTSIDE)
            counts = torch.where(column >= 0, moved, counts)
        return counts, tails

    def _next_of_end(self, tails: Tensor) -> Tensor:
        """Returns the next token of each row's end marker, int64 [num_active]; the output may end in a part of the
        marker."""
        lengths = torch.arange(self._nexts.size(1), device=tails.device)
        has_prefix = _matches(tails.unsqueeze(1), self._prefixes) & (lengths < self._lengths.unsqueeze(1))
        return self._nexts.gather(1, (has_prefix * lengths).amax(dim=1, keepdim=True)).squeeze(1)


def _matches(tails: Tensor, patterns: Tensor) -> Tensor:
    """Returns where `tails` [..., width] equal `patterns` in every place that is not ANY: bool [...]."""
    return ((tails == patterns) | (patterns == ANY)).all(dim=-1)


def _right_aligned(pattern: I32, width: int) -> I32:
    """Returns `pattern` padded with ANY on the left: int32 [width]."""
    out = np.full(width, ANY, dtype=np.int32)
    out[width - len(pattern) :] = pattern
    return out


def _num_open_tokens(tokens: I32, start: I32, end: I32) -> int:
    """Counts the tokens after the first `start` that follows the last `end`; OUTSIDE if no section is open."""
    last_end = _occurrences(tokens, end)[-1:]
    rest = tokens[int(last_end[0]) + len(end) :] if len(last_end) else tokens
    first_start = _occurrences(rest, start)[:1]
    return len(rest) - int(first_start[0]) - len(start) if len(first_start) else OUTSIDE


def _occurrences(tokens: I32, pattern: I32) -> Rows:
    """Returns every index at which `pattern` begins in `tokens`."""
    if len(tokens) < len(pattern):
        return np.zeros(0, dtype=np.intp)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(pattern))
    return np.flatnonzero((windows == pattern).all(axis=1))
