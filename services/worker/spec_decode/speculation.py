"""Speculation of a worker: requests drafts before a step, and records after it which were accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.spec_decode.acceptance_rates import SequenceAcceptanceRates
from quire.services.worker.spec_decode.history import TokenHistory
from quire.services.worker.spec_decode.proposer import DraftRequest, Proposer
from quire.services.worker.spec_decode.slot_table import DraftingSlotTable
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.drafts.drafts import Drafts
from quire.services.worker.step.plan import NO_CHANGES, StepPlan
from quire.services.worker.step.slots import NewBlocks, ResolvedPlan, Rows, Step
from quire.services.worker.step.steady_decode import SteadyDecode
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32


@dataclass(frozen=True, slots=True)
class ProposedDrafts:
    """Result of a propose() call that was made ahead of advance()."""

    drafts: Drafts | None


class Speculation:
    """Owns the token history and the proposer; requests drafts before a step and records after it which were accepted.
    Shares the slot table with the replica."""

    def __init__(
        self,
        proposer: Proposer,
        history: TokenHistory,
        table: DraftingSlotTable,
        limits: WorkerLimits,
        *,
        adaptive: bool,
        constrained_only: bool = False,
        trees: bool = False,
    ) -> None:
        """`adaptive`: shortens drafts of sequences that are often wrong; `constrained_only`: drafts only for sequences
        under a grammar; `trees`: drafts are trees, whose accepted length says little about the best draft length."""
        self.table = table
        self.adaptive = adaptive
        self._adapts_lengths = adaptive and not trees
        self._acceptance = SequenceAcceptanceRates(limits.max_num_seqs)
        self.num_speculative_tokens = table.num_speculative_tokens
        self._proposer = proposer
        self.constrained_only = constrained_only
        self._history = history
        self._num_unrecorded = 0  # steps with drafts in flight
        self._proposed: ProposedDrafts | None = None  # for the step that is being resolved
        self._forced_drafts: Drafts | None = None

    @property
    def fixed_draft_length(self) -> bool:
        return not self.adaptive

    def force_drafts(self, drafts: Drafts) -> None:
        """Stores drafts that the next step that may have drafts uses once, instead of the proposer's."""
        self._forced_drafts = drafts

    def clear_history(self) -> None:
        """Drops everything kept of finished sequences."""
        self._proposer.clear_history()

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies the drafter's KV of copied blocks, before the step starts any sequence."""
        self._proposer.copy_blocks(copies)

    def start_sequence(self, slot: int, token_ids: I32) -> None:
        """Starts a new sequence in `slot` with `token_ids`: resets its acceptance rate and history, then informs the
        proposer."""
        self._acceptance.reset(slot)
        self._history.start_sequence(slot, token_ids)
        self._proposer.start_sequence(slot)

    def end_sequence(self, slot: int) -> None:
        self._proposer.end_sequence(slot)

    def waits_before(self, plan: StepPlan) -> bool:
        """Returns whether all earlier steps must be recorded before this plan: drafts start at the exact end of
        sequences, which steps with drafts in flight leave open."""
        ordered = plan.changes.num_draft_tokens
        drafts = self.table.num_draft_tokens if ordered is None else ordered
        return bool(drafts) or self._num_unrecorded > 0

    def follow(self, plan: StepPlan, steady: SteadyDecode) -> tuple[StepInputs, NewBlocks] | None:
        """Returns a step without drafts and its new blocks if it follows from the last one, else None. Keeps drafts
        that it finds instead for the advance() call that comes next."""
        slots = steady.slots
        if self.table.num_draft_tokens and slots is not None:
            if plan.changes is not NO_CHANGES or len(plan.new_block_ids) or len(plan.new_block_slots):
                return None
            self._proposed = ProposedDrafts(self._propose(slots, self.table.max_drafts(slots)))
            if self._proposed.drafts is not None:
                return None
        followed = steady.follow(plan)
        if followed is not None:
            self._proposed = None
            if len(followed[1].ids):
                self._proposer.add_blocks(followed[1])
        return followed

    def advance(self, order: ResolvedPlan) -> tuple[Step, Drafts | None]:
        """Turns the resolved plan into a step, and proposes its drafts, unless follow() has proposed them; None if it
        has none."""
        self._proposer.add_blocks(order.new_blocks)
        proposed, self._proposed = self._proposed, None
        drafts = proposed.drafts if proposed else self._propose_for(order)
        self._num_unrecorded += drafts is not None
        return self.table.advance(order, drafts), drafts

    @property
    def num_begun(self) -> int:
        """Number of sequences started so far. record() compares its value at a step's launch to find slots that changed
        since."""
        return self._history.num_begun

    def record(self, inputs: StepInputs, output: RunnerOutput, num_begun: int) -> None:
        """Records the output of a step that was launched when `num_begun` sequences had started: extends the history,
        commits accepted drafts and informs the proposer. Slots that have changed their sequence since are left out."""
        history = self._history
        if output.drafted:
            self._num_unrecorded -= 1
            self._record_drafted(inputs, output, num_begun)
        else:
            history.append_each(inputs.sampled_slots, output.token_ids, num_begun)
        if output.features is None or bool(history.is_unchanged_since(inputs.slots, num_begun).all()):
            self._proposer.record_step(inputs, output)

    def _record_drafted(self, inputs: StepInputs, output: RunnerOutput, num_begun: int) -> None:
        """Commits the accepted drafts of a step in the slot table, updates acceptance rates, and appends the tokens of
        slots with unchanged sequences to the history."""
        slots, counts, token_ids = inputs.sampled_slots, output.token_counts, output.token_ids
        self.table.commit_accepted(slots, counts)
        if inputs.drafts is not None and self._adapts_lengths:
            self._acceptance.update(slots, inputs.drafts.counts, counts - 1)
        current = self._history.is_unchanged_since(slots, num_begun)
        if not current.all():
            slots, counts, token_ids = slots[current], counts[current], token_ids[np.repeat(current, counts)]
        self._history.extend(slots, counts, token_ids)

    def _propose_for(self, order: ResolvedPlan) -> Drafts | None:
        """Proposes drafts for the slots that may have some in a resolved plan; None if the plan allows none or none are
        found."""
        if order.max_drafts is None:
            return None
        slots = np.flatnonzero(order.max_drafts)
        return self._propose(slots, order.max_drafts[slots])

    def _propose(self, slots: Rows, counts: I32) -> Drafts | None:
        """Requests drafts of `slots`, at most `counts` each, shortened by their acceptance rates; returns forced drafts
        instead if some are stored. None without any."""
        if self._forced_drafts is not None:
            drafts, self._forced_drafts = self._forced_drafts, None
            return drafts
        if self._adapts_lengths:
            counts = np.minimum(counts, self._acceptance.draft_lengths(slots)).astype(np.int32)
        if not counts.all():
            slots, counts = slots[counts > 0], counts[counts > 0]
        return self._proposer.propose(DraftRequest(slots, counts, self._history)) if len(slots) else None
