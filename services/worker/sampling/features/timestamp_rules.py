"""Rules for the time stamps that Whisper samples among its text (arXiv 2212.04356): they come in pairs and rise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions, check_token_ids, rows_by_slot
from quire.services.worker.sampling.vocabulary.port import Vocabulary
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared import columns
from quire.shared.columns import I32

NONE = -2  # token before the output began, and the latest time stamp before there is one
ANY_STEPS = np.iinfo(np.int32).max // 2  # bound of the first time stamp without one
NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class SlotRules:
    """Rules of one slot."""

    first: int  # id of the time stamp of 0.00 s
    declining: int  # id of the token that declines time stamps
    max_initial: int  # highest id of an output's first token
    end: int  # id of the token that ends an output


class TimestampOrder:
    """Sampling feature that keeps, on the device, the last two tokens of each slot's output and its latest time stamp:
    int32 [num_slots, 3]."""

    parameters = frozenset({"timestamps"})

    def __init__(self, num_slots: int, vocabulary: Vocabulary, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self._device = device
        self._rules: dict[int, SlotRules] = {}
        self.states: Tensor = torch.full((num_slots, 3), NONE, dtype=torch.int32, device=device)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the rules of the slot, and the state after its output so far. Raises InvalidArgument for ids outside
        of the vocabulary."""
        asked = admission.timestamps
        if asked is None:
            return
        ends = columns.u32(admission.eos_token_ids).astype(np.int32)
        check_token_ids(
            np.array([asked.first_id, asked.declining_id, *ends], dtype=np.int64).astype(np.int32),
            self.vocabulary.shard.vocab_size,
            "timestamps",
        )
        steps = asked.max_initial_steps if asked.HasField("max_initial_steps") else ANY_STEPS
        end = int(ends[0]) if len(ends) else NONE
        max_initial = asked.first_id + min(steps, ANY_STEPS)
        self._rules[slot] = SlotRules(asked.first_id, asked.declining_id, max_initial, end)
        output = columns.i32(admission.token_ids)[admission.num_prompt_tokens :]
        self.states[slot] = upload(_state_after(output, asked.first_id), self._device)

    def release(self, slot: int) -> None:
        self._rules.pop(slot, None)

    def bind(self, slots: Rows) -> BoundTimestampOrder | None:
        """Prepares the rows of slots with rules; None if there are none."""
        active = {row: self._rules[slot] for row, slot in enumerate(slots.tolist()) if slot in self._rules}
        if not active:
            return None
        return BoundTimestampOrder(self, np.array(list(active)), slots, list(active.values()), self._device)


class BoundTimestampOrder:
    """Rules of the rows that have some."""

    def __init__(
        self, owner: TimestampOrder, rows: Rows, slots: Rows, rules: list[SlotRules], device: torch.device
    ) -> None:
        self._owner = owner
        own_slots, own_rows = rows_by_slot(rows, slots[rows])
        first_of = np.searchsorted(rows, own_rows[:, 0])  # each slot's first row, as index into the active rows
        self._rows, self._slots, self._own_slots, self._own_rows, self._first_of = (
            upload(values, device) for values in (rows, slots[rows], own_slots, own_rows, first_of)
        )
        self._first, self._declining, self._max_initial, self._end = (
            upload(np.array(values, dtype=np.int32)[:, None], device)
            for values in zip(*((one.first, one.declining, one.max_initial, one.end) for one in rules), strict=True)
        )
        shard = owner.vocabulary.shard
        self._ids = shard.first + torch.arange(shard.size, dtype=torch.int32, device=device)

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Bans, in place, the tokens that break a rule."""
        states = self._owner.states[self._slots]
        if positions.drafts is not None:
            states = _advance(states, positions.drafts[self._rows], self._first)
        rows = logits[self._rows].masked_fill(self._banned(states), NEVER)
        logits[self._rows] = self._with_likely_times(rows)

    def _banned(self, states: Tensor) -> Tensor:
        """Returns which tokens may not follow: bool [num_active, shard.size]."""
        before, last, latest = (column.unsqueeze(1) for column in states.unbind(1))
        is_time = self._ids >= self._first
        begins = last == NONE
        after_time = last >= self._first
        is_paired = after_time & ((before >= self._first) | (before == NONE))
        is_open = after_time & ~is_paired  # the successor's begin, or the end of the output, follows
        least = torch.where(latest == NONE, self._first, torch.where(is_open, latest, latest + 1))
        banned = self._ids == self._declining
        banned = banned | (is_time & (is_paired | (self._ids < least)))
        banned = banned | (~is_time & is_open & (self._ids != self._end))
        return banned | (begins & (~is_time | (self._ids > self._max_initial)))

    def _with_likely_times(self, rows: Tensor) -> Tensor:
        """Bans text in rows whose time stamps are together more likely than any single token of text."""
        vocabulary, is_time = self._owner.vocabulary, self._ids >= self._first
        times, text = rows.masked_fill(~is_time, NEVER), rows.masked_fill(is_time, NEVER)
        highest = vocabulary.all_reduce_max(times.amax(dim=1, keepdim=True)).clamp(min=torch.finfo(rows.dtype).min)
        total = vocabulary.all_reduce_sum((times - highest).exp().sum(dim=1, keepdim=True)).log() + highest
        likely = total > vocabulary.all_reduce_max(text.amax(dim=1, keepdim=True))
        return rows.masked_fill(likely & ~is_time, NEVER)

    def sampled(self, token_ids: Tensor) -> None:
        """Advances the state of the slots by the rows' new tokens."""
        owner, slots = self._owner, self._own_slots
        new = token_ids[self._own_rows].to(torch.int32).masked_fill(self._own_rows < 0, -1)
        owner.states[slots] = _advance(owner.states[slots], new, self._first[self._first_of])


def _advance(states: Tensor, new: Tensor, first: Tensor) -> Tensor:
    """Returns the states [n, 3] after the tokens of `new` [n, max_new], -1 for none; `first`: [n, 1]."""
    before, last, latest = states.unbind(1)
    for token in new.unbind(1):
        is_token = token >= 0
        is_time = is_token & (token >= first.squeeze(1))
        before, last = torch.where(is_token, last, before), torch.where(is_token, token, last)
        latest = torch.where(is_time, torch.maximum(latest, token), latest)
    return torch.stack((before, last, latest), dim=1)


def _state_after(output: I32, first: int) -> I32:
    """Returns the last two tokens of an output and its latest time stamp."""
    times = output[output >= first]
    tail = np.concatenate((np.full(2, NONE, dtype=np.int32), output))[-2:]
    return np.array([*tail, times.max() if len(times) else NONE], dtype=np.int32)
