"""Runner of a worker that executes no steps: it encodes media for other workers."""

from __future__ import annotations

from typing import NoReturn

from quire.services.worker.lora.no_adapters import NO_ADAPTERS, StepAdapters
from quire.services.worker.media.step_media import NO_STEP_MEDIA, SlotMedia
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.beam_moves import BeamMoves
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.plan_violation import PlanViolation
from quire.services.worker.step.slots import NewBlocks, Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32


class NoSlotState:
    """Heads without slots."""

    num_query_vectors = 0

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Refuses the plan: raises PlanViolation, as an encode worker executes no steps."""
        _refuse()

    def release(self, slot: int) -> None:
        """Does nothing: no slot has a state."""

    def drop_queries(self, names: bytes) -> None:
        """Does nothing: no query has vectors."""

    def clear_queries(self) -> None:
        """Does nothing: no query has vectors."""


class NoSteps:
    """Null object for replica.flight.Runner, which refuses every plan."""

    heads = NoSlotState()
    media: SlotMedia = NO_STEP_MEDIA
    adapters: StepAdapters = NO_ADAPTERS

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Refuses the plan: raises PlanViolation, as an encode worker executes no steps."""
        _refuse()

    def move_beams(self, moves: BeamMoves) -> None:
        """Refuses the plan: raises PlanViolation, as an encode worker executes no steps."""
        _refuse()

    def move_tokens(self, sources: I32, targets: I32) -> None:
        """Refuses the plan: raises PlanViolation, as an encode worker executes no steps."""
        _refuse()

    def launch(self, inputs: StepInputs, new_blocks: NewBlocks) -> NoReturn:
        """Refuses the plan: raises PlanViolation, as an encode worker executes no steps."""
        _refuse()

    def launch_pending_heads(self, slots: Rows | None = None) -> None:
        """Does nothing: no step is pending."""


def _refuse() -> NoReturn:
    raise PlanViolation("an encode worker executes no steps")
