"""What speculation asks of whoever drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeVar

from services.worker.block_copies import BlockCopies
from services.worker.model_runner import Outcome
from services.worker.slots import NewBlocks, Rows
from services.worker.spec_decode.drafts import Drafts
from services.worker.spec_decode.history import TokenHistory
from services.worker.step_inputs import StepInputs
from shared.columns import I32

T = TypeVar("T")

LEAST_S = 0.002  # of searching for drafts in tokens that any step may have
SHARE = 0.5  # of a forward pass, the same


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
    """Of those that look at nothing but tokens. The device waits meanwhile, so that a search may not take long."""

    _forward_s = 0.0  # of the last step
    _turn = 0  # whose search comes first: who got none has a turn later

    def search(self, wanted: Wanted, find: Callable[[I32, int], I32]) -> Drafts | None:
        """What `find` makes of the tokens of each, and how many are wanted of it, as far as there is time."""
        each = list(zip(wanted.slots.tolist(), wanted.counts.tolist(), strict=True))
        return Drafts.of({slot: find(wanted.history.of(slot), most) for slot, most in self.in_time(each)})

    def in_time(self, searches: Sequence[T]) -> Iterator[T]:
        """As many of them as there is time for; the others come first the next time."""
        end = perf_counter() + max(LEAST_S, SHARE * self._forward_s)
        for _ in searches:
            at = self._turn % len(searches)
            self._turn = at + 1
            yield searches[at]
            if perf_counter() > end:
                break

    def hand_out(self, new: NewBlocks) -> None:
        """Nothing is kept by block."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Nothing is kept by block."""

    def begin(self, slot: int) -> None:
        """Nothing is kept by slot."""

    def end(self, slot: int) -> None:
        """Nothing is kept by slot."""

    def observe(self, inputs: StepInputs, outcome: Outcome) -> None:
        self._forward_s = outcome.timings.forward_us / 1e6

    def forget(self) -> None:
        """Nothing outlives a sequence."""
