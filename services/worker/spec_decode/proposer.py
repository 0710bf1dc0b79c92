"""What speculation asks of whoever drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.worker.block_copies import BlockCopies
from services.worker.model_runner import Outcome
from services.worker.slots import NewBlocks, Rows
from services.worker.spec_decode.drafts import Drafts
from services.worker.spec_decode.history import TokenHistory
from services.worker.step_inputs import StepInputs
from shared.columns import I32


@dataclass(frozen=True, slots=True)
class Wanted:
    """Whose next tokens are to be guessed."""

    slots: Rows  # ascending
    counts: I32  # [num_slots] at most so many of each, at least 1
    history: TokenHistory


class Proposer(Protocol):
    """Guesses next tokens. A wrong guess costs time and nothing else, so nothing here needs to be exact."""

    def propose(self, wanted: Wanted) -> Drafts | None:
        """Drafts of some of the slots; None: of nobody."""

    def hand_out(self, new: NewBlocks) -> None:
        """Slots get these blocks, before anything is proposed for them."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """What slots will get, before any of them begins."""

    def begin(self, slot: int) -> None:
        """A new sequence has the slot; its tokens are in the history, its cached blocks in the table."""

    def end(self, slot: int) -> None:
        """The slot is released; its tokens are still in the history."""

    def observe(self, inputs: StepInputs, outcome: Outcome) -> None:
        """A step has run, and the history is past it."""

    def forget(self) -> None:
        """What sequences left that have ended: it is not to come up again."""


class HostProposer:
    """Of those that look at nothing but tokens."""

    def hand_out(self, new: NewBlocks) -> None:
        """Nothing is kept by block."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Nothing is kept by block."""

    def begin(self, slot: int) -> None:
        """Nothing is kept by slot."""

    def end(self, slot: int) -> None:
        """Nothing is kept by slot."""

    def observe(self, inputs: StepInputs, outcome: Outcome) -> None:
        """The history says all."""

    def forget(self) -> None:
        """Nothing outlives a sequence."""
