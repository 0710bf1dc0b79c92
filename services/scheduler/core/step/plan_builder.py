"""Builder of a step plan, the token budget of the step, and the record of a step in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from operator import itemgetter
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.plan import I32, Admission, BeamMove, StepPlan
from quire.services.scheduler.core.running.running import Running, Slots
from quire.shared.step_value import step_value

NO_SLOTS: Slots = np.zeros(0, dtype=np.intp)
NO_SEQUENCES: Mapping[int, int] = MappingProxyType({})


@step_value
class InFlightStep:
    """Step in flight: the slots that sample in it, ascending, and the sequences that held them when it was planned."""

    step_id: int
    slots: Slots
    keys: npt.NDArray[np.int64]
    asks_logprobs: npt.NDArray[np.bool_]  # which of them asked for log-probabilities
    prompt_logprob_keys: dict[
        int, int
    ]  # slots that may return prompt log-probabilities, and the keys of their sequences
    num_tokens: int
    num_prompt_tokens: int  # prompt tokens among these
    planned_at: float
    drafts: I32 | None = None  # maximum drafts of each; None: no drafts
    pooled_keys: Mapping[int, int] = field(default_factory=dict)  # keys of sequences that end without a sample, by slot
    late_queries: Mapping[int, bool] = field(default_factory=dict)  # of these, queries (True) and scored documents

    def select(self, rows: npt.NDArray[np.bool_]) -> InFlightStep:
        """Returns the step with the selected rows only; drafts are not selected."""
        return replace(self, slots=self.slots[rows], keys=self.keys[rows], asks_logprobs=self.asks_logprobs[rows])


class TokenBudget:
    """Tokens that can still be scheduled in this step."""

    def __init__(self, tokens: int) -> None:
        self.remaining = tokens
        self._withheld = 0  # tokens that the worker could compute as well

    def limit(self, tokens: int) -> None:
        """Limits what remains to `tokens`; try_take_whole() may exceed the limit."""
        excess = max(0, self.remaining - tokens)
        self.remaining -= excess
        self._withheld += excess

    def try_add(self, wanted: int, at_most: int) -> int:
        """Takes up to `wanted` tokens, at most `at_most`; returns how many were granted."""
        granted = min(wanted, at_most, self.remaining)
        self.remaining -= granted
        return granted

    def has_room(self, wanted: int) -> bool:
        """Returns whether the worker can compute `wanted` more tokens in this step, whatever the limit is."""
        return wanted <= self.remaining + self._withheld

    def try_take_whole(self, wanted: int) -> bool:
        """Takes `wanted` tokens, beyond limit() if necessary, if the worker can compute that many more in this step;
        returns whether it did."""
        if not self.has_room(wanted):
            return False
        excess = max(0, wanted - self.remaining)
        self.remaining -= wanted - excess
        self._withheld -= excess
        return True

    def try_take(self, wanted: int) -> bool:
        """Takes `wanted` tokens if that many are left; returns whether it did."""
        if wanted > self.remaining:
            return False
        self.remaining -= wanted
        return True


class PlanBuilder:
    """Collects the decisions of the parts of schedule() for one step."""

    def __init__(self, max_num_batched_tokens: int, *, names_block_slots: bool = False) -> None:
        """`names_block_slots`: the plan names the slots of new blocks."""
        self.budget = TokenBudget(max_num_batched_tokens)
        self.num_drafts = 0  # maximum drafts of a slot that advances without being named
        self.num_tokens = 0
        self.micro_batch = 0  # micro-batch whose slots may compute
        self.short_of_blocks = False  # a running sequence was skipped or preempted; admit nothing
        self.ready = NO_SLOTS  # slots that advance by one token without being named
        self._chunks: dict[int, int] = {}  # scheduled prompt tokens by slot
        self._finishing: set[int] = set()  # slots whose prompt ends in this step, and that sample
        self._drafting: set[int] = set()  # of these, slots that may draft
        self._ending: set[int] = set()  # slots that compute their last token and sample nothing
        self._names_block_slots = names_block_slots
        self._counted: dict[int, int] = {}
        self._new_blocks: list[tuple[int, list[int]]] = []
        self._admitted: list[Admission] = []
        self._copies: list[tuple[int, int]] = []
        self._moves: dict[int, BeamMove] = {}  # by slot

    def advance(self, ready: Slots) -> None:
        """Schedules one token, and num_drafts drafts, for each of the `ready` slots (ascending), which the plan need
        not name, and subtracts them from the budget. Replaces the slots of an earlier call."""
        self.ready = ready
        num_tokens = len(ready) * (1 + self.num_drafts)
        self.num_tokens += num_tokens
        self.budget.remaining -= num_tokens

    def skip(self, slot: int) -> None:
        """Excludes a ready slot from this step."""
        self._counted[slot] = 0

    def add_chunk(self, slot: int, num_tokens: int, *, implied: bool, samples: bool, drafts: bool = False) -> None:
        """Records the next `num_tokens` tokens of a slot's prompt, or of a beam. `implied`: the slot need not be
        named; `samples`: the chunk completes the known tokens, so the slot samples; `drafts`: it drafts after it.
        The caller has taken the tokens from the budget."""
        self.num_tokens += num_tokens
        self._chunks[slot] = num_tokens
        if not implied:
            self._counted[slot] = num_tokens
        if samples:
            self._finishing.add(slot)
        if drafts:
            self._drafting.add(slot)
            self.num_tokens += self.num_drafts
            self._chunks[slot] += self.num_drafts

    def mark_ending(self, slot: int) -> None:
        """Marks `slot` as one that samples nothing and computes its last token."""
        self._ending.add(slot)

    def add_blocks(self, slot: int, blocks: list[int]) -> None:
        self._new_blocks.append((slot, blocks))

    def add_blocks_each(self, slots: Sequence[int], blocks: Sequence[list[int]]) -> None:
        """Adds new blocks to each of `slots`."""
        self._new_blocks += zip(slots, blocks, strict=True)

    def admit(self, admission: Admission) -> None:
        self._admitted.append(admission)

    def remove_slot(self, slot: int) -> None:
        """Removes a preempted slot from this step, with its new blocks; its tokens return to the budget."""
        num_removed = self._chunks.pop(slot, 0)
        if slot in self.ready:
            self.ready = self.ready[self.ready != slot]
            num_removed = 1 + self.num_drafts
        self.num_tokens -= num_removed
        self.budget.remaining += num_removed
        self._finishing.discard(slot)
        self._drafting.discard(slot)
        self._ending.discard(slot)
        self._counted.pop(slot, None)
        self._new_blocks = [gain for gain in self._new_blocks if gain[0] != slot]

    def copy(self, blocks: Sequence[int], to: Sequence[int]) -> None:
        """Schedules block copies before the step: each of `to` gets the content of the corresponding one of
        `blocks`."""
        self._copies += zip(blocks, to, strict=True)

    def move(self, move: BeamMove) -> None:
        self._moves[move.slot] = move

    def has_beam_move(self, slot: int) -> bool:
        """Returns whether a beam is moved to, admitted in or continued in `slot` in this step."""
        return slot in self._moves or any(admission.slot == slot for admission in self._admitted)

    def has_chunk(self, slot: int) -> bool:
        """Returns whether `slot` computes part of a prompt, or a token of a beam."""
        return slot in self._chunks

    def is_ending(self, slot: int) -> bool:
        """Returns whether `slot` samples nothing and computes its last token in this step."""
        return slot in self._ending

    @property
    def completed_prompts(self) -> list[int]:
        """Slots whose prompts end in this step."""
        return [*self._finishing, *self._ending]

    def build_step_in_flight(self, step_id: int, running: Running, now: float) -> InFlightStep:
        """Returns the record of this step for its result: slots that sample, ascending, and the keys of the
        sequences that hold them now. `now`: seconds, from the core's origin."""
        slots = self.ready
        if self._finishing:
            slots = np.sort(np.concatenate([slots, np.array(list(self._finishing), dtype=np.intp)]))
        prompt_logprob_keys = {
            slot: int(running.keys[slot]) for slot in self._chunks if running.asks_prompt_logprobs[slot]
        }
        return InFlightStep(
            step_id,
            slots,
            running.keys[slots],
            running.asks_logprobs[slots],
            prompt_logprob_keys,
            self.num_tokens,
            sum(self._chunks.values()),
            now,
            self._drafts_of(slots),
            {slot: int(running.keys[slot]) for slot in self._ending} if self._ending else NO_SEQUENCES,
            self._late(running) if self._ending else {},
        )

    def _late(self, running: Running) -> dict[int, bool]:
        ending = ((slot, running.sequence(slot)) for slot in self._ending)
        return {slot: sequence.is_query for slot, sequence in ending if sequence.query is not None}

    def _drafts_of(self, slots: Slots) -> I32 | None:
        """Returns the maximum drafts [num_slots] of each of `slots`, 0 where the slot ends a prompt and does not
        draft; None if the step has no drafts."""
        if not self.num_drafts:
            return None
        drafts = np.full(len(slots), self.num_drafts, dtype=np.int32)
        plain = self._finishing - self._drafting
        if plain:
            drafts[np.isin(slots, list(plain))] = 0
        return drafts

    def build_plan(self, step_id: int, released: list[int], num_draft_tokens: int | None) -> StepPlan:
        """Returns the plan for the worker. `released`: slots to name as free; `num_draft_tokens`: maximum drafts per
        slot from this step on, None: unchanged."""
        counted = sorted(self._counted)
        if len(self._new_blocks) > 1:
            self._new_blocks.sort(key=itemgetter(0))  # a slot's blocks stay in their order
        return StepPlan(
            step_id,
            self.num_tokens,
            released,
            self._admitted,
            counted,
            [self._counted[slot] for slot in counted],
            [block for _, blocks in self._new_blocks for block in blocks],
            num_draft_tokens,
            [slot for slot, blocks in self._new_blocks for _ in blocks] if self._names_block_slots else None,
            self._copies,
            [self._moves[slot] for slot in sorted(self._moves)],
            self.micro_batch,
        )
