"""What speculation asks of a proposer of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.spec_decode.history import TokenHistory
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.drafts.drafts import Drafts
from quire.services.worker.step.slots import NewBlocks, Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32

T = TypeVar("T")

# Work is counted in tokens read, of which compiled code and NumPy read about 1 in a ns. It is no time: equal requests
# then take equal steps, however busy the machine is.
MAX_WORK = 3 * 2**20  # of searching for drafts in a step, some 3 ms
SEARCH_WORK = 2**16  # of one search, besides what it reads: the 60 µs that suffixes take in Python


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Whose next tokens are to be guessed."""

    slots: Rows  # ascending
    counts: I32  # [num_slots] at most so many of each, at least 1
    history: TokenHistory


Wanted = DraftRequest  # deprecated name, for drafters of other packages


class Proposer(Protocol):
    """Guesses next tokens. A wrong guess costs time and nothing else, so nothing here needs to be exact."""

    def propose(self, wanted: DraftRequest) -> Drafts | None:
        """Drafts for some of the slots; None if no slot has a draft."""

    def add_blocks(self, new: NewBlocks) -> None:
        """Slots get these blocks, before anything is proposed for them."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """What slots will get, before any of them begins."""

    def start_sequence(self, slot: int) -> None:
        """A new sequence has the slot; its tokens are in the history, its cached blocks in the table."""

    def end_sequence(self, slot: int) -> None:
        """The slot is released; its tokens are still in the history."""

    def record_step(self, inputs: StepInputs, output: RunnerOutput) -> None:
        """A step has run, and the history is past it."""

    def clear_history(self) -> None:
        """What sequences left that have ended: it is not to come up again."""


class HostProposer:
    """Of those that look at nothing but tokens. The device waits meanwhile, so that a search may not take long."""

    max_work = MAX_WORK  # of a step
    search_work = SEARCH_WORK  # of a search, besides what it reads
    _turn = 0  # whose search comes first: who got none has a turn later

    def search(self, wanted: DraftRequest, find: Callable[[I32, int], I32]) -> Drafts | None:
        """What `find` makes of the tokens of each, and how many are wanted of it, as far as `max_work` goes."""
        each = [
            (slot, wanted.history.tokens_of(slot), most)
            for slot, most in zip(wanted.slots.tolist(), wanted.counts.tolist(), strict=True)
        ]
        work = [self.search_work + len(tokens) for _, tokens, _ in each]
        return Drafts.of({slot: find(tokens, most) for slot, tokens, most in self.affordable(each, work)})

    def affordable(self, searches: Sequence[T], work: Sequence[int]) -> Iterator[T]:
        """As many of them as `max_work` covers, at least one; the others come first the next time."""
        left = self.max_work
        for _ in searches:
            at = self._turn % len(searches)
            if left < self.max_work and work[at] > left:
                break
            self._turn = at + 1
            left -= work[at]
            yield searches[at]

    def add_blocks(self, new: NewBlocks) -> None:
        """Nothing is kept by block."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Nothing is kept by block."""

    def start_sequence(self, slot: int) -> None:
        """Nothing is kept by slot."""

    def end_sequence(self, slot: int) -> None:
        """Nothing is kept by slot."""

    def record_step(self, inputs: StepInputs, output: RunnerOutput) -> None:
        """Nothing is learned from steps."""

    def clear_history(self) -> None:
        """Nothing outlives a sequence."""
