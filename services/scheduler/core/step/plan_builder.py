"""A step while it is being put together, and while it is under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from operator import itemgetter
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.plan import I32, Admission, BeamMove, StepPlan
from quire.services.scheduler.core.running.running import Running, Slots
from quire.services.scheduler.core.step.budget import TokenBudget
from quire.shared.step_value import step_value

NO_SLOTS: Slots = np.zeros(0, dtype=np.intp)
NO_SEQUENCES: Mapping[int, int] = MappingProxyType({})


@step_value
class InFlightStep:
    """A step under way: the slots that sample in it, ascending, and whose they were when it was planned."""

    step_id: int
    slots: Slots
    keys: npt.NDArray[np.int64]
    asks_logprobs: npt.NDArray[np.bool_]  # which of them asked for log-probabilities
    prompt_logprob_keys: dict[int, int]  # slots that may tell of their prompt, and the keys of their sequences
    num_tokens: int
    num_prompt_tokens: int  # of these
    planned_at: float
    drafts: I32 | None = None  # most drafts of each; None: nobody drafts
    pooled_keys: Mapping[int, int] = field(
        default_factory=dict
    )  # slots that end without a sample, and their sequences' keys
    late_queries: Mapping[int, bool] = field(
        default_factory=dict
    )  # of these, queries (True) and documents that are compared

    def select(self, rows: npt.NDArray[np.bool_]) -> InFlightStep:
        """Some of the slots, where nobody drafts any more to ask about."""
        return replace(self, slots=self.slots[rows], keys=self.keys[rows], asks_logprobs=self.asks_logprobs[rows])


class PlanBuilder:
    """Collects what the parts of schedule() decide."""

    def __init__(self, max_num_batched_tokens: int, *, names_block_slots: bool = False) -> None:
        """`names_block_slots`: the plan says whose the new blocks are."""
        self.budget = TokenBudget(max_num_batched_tokens)
        self.num_drafts = 0  # most that a slot may draft which advances unnamed
        self.num_tokens = 0
        self.micro_batch = 0  # whose slots may compute
        self.short_of_blocks = False  # somebody had to wait or to go: nobody new comes in
        self.ready = NO_SLOTS  # advance by one token, unnamed
        self._chunks: dict[int, int] = {}  # tokens of the prompts computed in this step
        self._finishing: set[int] = set()  # prompts that end in this step, and so sample
        self._drafting: set[int] = set()  # of these, which may draft
        self._ending: set[int] = set()  # slots whose tokens are computed with this step, and that sample nothing
        self._names_block_slots = names_block_slots
        self._counted: dict[int, int] = {}
        self._new_blocks: list[tuple[int, list[int]]] = []
        self._admitted: list[Admission] = []
        self._copies: list[tuple[int, int]] = []
        self._moves: dict[int, BeamMove] = {}  # by slot

    def advance(self, ready: Slots) -> None:
        self.ready = ready
        num_tokens = len(ready) * (1 + self.num_drafts)
        self.num_tokens += num_tokens
        self.budget.remaining -= num_tokens

    def skip(self, slot: int) -> None:
        """`slot` would advance by itself, but does not in this step."""
        self._counted[slot] = 0

    def add_chunk(self, slot: int, num_tokens: int, *, implied: bool, samples: bool, drafts: bool = False) -> None:
        """`slot` computes part of its prompt, and drafts behind it if it `drafts`."""
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
        """`slot` samples nothing, and the chunk that it computes is its last."""
        self._ending.add(slot)

    def add_blocks(self, slot: int, blocks: list[int]) -> None:
        self._new_blocks.append((slot, blocks))

    def add_blocks_each(self, slots: Sequence[int], blocks: Sequence[list[int]]) -> None:
        """Some for each of `slots`."""
        self._new_blocks += zip(slots, blocks, strict=True)

    def admit(self, admission: Admission) -> None:
        self._admitted.append(admission)

    def remove_slot(self, slot: int) -> None:
        """`slot` was preempted: nothing of it is left in this step."""
        taken = self._chunks.pop(slot, 0)
        if slot in self.ready:
            self.ready = self.ready[self.ready != slot]
            taken = 1 + self.num_drafts
        self.num_tokens -= taken
        self.budget.remaining += taken
        self._finishing.discard(slot)
        self._drafting.discard(slot)
        self._ending.discard(slot)
        self._counted.pop(slot, None)
        self._new_blocks = [gain for gain in self._new_blocks if gain[0] != slot]

    def copy(self, blocks: Sequence[int], to: Sequence[int]) -> None:
        """Each of `to` takes over the content of one of `blocks` before the step."""
        self._copies += zip(blocks, to, strict=True)

    def move(self, move: BeamMove) -> None:
        self._moves[move.slot] = move

    def has_beam_move(self, slot: int) -> bool:
        """Whether a beam goes on there in this step, in whatever way."""
        return slot in self._moves or any(admission.slot == slot for admission in self._admitted)

    def has_chunk(self, slot: int) -> bool:
        """Whether `slot` computes part of a prompt, or is a beam that goes on."""
        return slot in self._chunks

    def is_ending(self, slot: int) -> bool:
        """Whether `slot` samples nothing, and computes its last token in this step."""
        return slot in self._ending

    @property
    def completed_prompts(self) -> list[int]:
        """Slots whose prompts end in this step."""
        return [*self._finishing, *self._ending]

    def build_step_in_flight(self, step_id: int, running: Running, now: float) -> InFlightStep:
        slots = self.ready
        if self._finishing:
            slots = np.sort(np.concatenate([slots, np.array(list(self._finishing), dtype=np.intp)]))
        telling = {slot: int(running.keys[slot]) for slot in self._chunks if running.asks_prompt_logprobs[slot]}
        return InFlightStep(
            step_id,
            slots,
            running.keys[slots],
            running.asks_logprobs[slots],
            telling,
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
        if not self.num_drafts:
            return None
        drafts = np.full(len(slots), self.num_drafts, dtype=np.int32)
        plain = self._finishing - self._drafting
        if plain:
            drafts[np.isin(slots, list(plain))] = 0
        return drafts

    def build_plan(self, step_id: int, released: list[int], num_draft_tokens: int | None) -> StepPlan:
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
