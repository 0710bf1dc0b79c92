"""Speculation of a worker that drafts nothing."""

from __future__ import annotations

from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.slots import NewBlocks, ResolvedPlan, SlotTable, Step
from quire.services.worker.step.steady_decode import SteadyDecode
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32


class NoSpeculation:
    """Speculation of a worker without a drafting method (null object): runs steps as their plans say and keeps no
    history."""

    num_speculative_tokens = num_begun = 0
    fixed_draft_length = constrained_only = False

    def __init__(self, table: SlotTable) -> None:
        self.table = table

    def waits_before(self, plan: StepPlan) -> bool:
        return False

    def follow(self, plan: StepPlan, steady: SteadyDecode) -> tuple[StepInputs, NewBlocks] | None:
        return steady.follow(plan)

    def advance(self, order: ResolvedPlan) -> tuple[Step, None]:
        return self.table.advance(order), None

    def start_sequence(self, slot: int, token_ids: I32) -> None:
        """Does nothing: no history is kept."""

    def end_sequence(self, slot: int) -> None:
        """Does nothing: no history is kept."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Does nothing: there is no KV of drafts."""

    def record(self, inputs: StepInputs, output: RunnerOutput, num_begun: int) -> None:
        """Does nothing: no history is kept."""

    def clear_history(self) -> None:
        """Does nothing: no history is kept."""
