"""Interface between speculation and a proposer of drafts."""

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

# Work is counted in tokens read, about 1 per ns in compiled code and NumPy. It is not measured in time, so that equal
# requests take equal steps, however busy the machine is.
MAX_WORK = 3 * 2**20  # per step for searching drafts, some 3 ms
SEARCH_WORK = 2**16  # fixed cost of one search: the 60 µs that suffix decoding needs in Python


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Slots that need drafts, with the maximum of each."""

    slots: Rows  # ascending
    counts: I32  # [num_slots] maximum drafts of each, at least 1
    history: TokenHistory


Wanted = DraftRequest  # deprecated name, for drafters of other packages


class Proposer(Protocol):
    """Guesses next tokens. A wrong guess costs time only, so that no implementation needs to be exact."""

    def propose(self, request: DraftRequest) -> Drafts | None:
        """Returns drafts for some of the slots; None if no slot has a draft."""

    def add_blocks(self, new: NewBlocks) -> None:
        """Registers newly assigned blocks before drafts are proposed for their slots; what the drafter kept of these
        block ids is invalid, unless their content is cached."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies the drafter's KV of copied blocks, before the sequences that use the copies start."""

    def start_sequence(self, slot: int) -> None:
        """Starts a new sequence in `slot`; its tokens are in the history, its cached blocks in the table."""

    def end_sequence(self, slot: int) -> None:
        """Ends the sequence of `slot`, whose tokens are still in the history: the proposer may keep them for other
        sequences."""

    def record_step(self, inputs: StepInputs, output: RunnerOutput) -> None:
        """Processes a finished step, whose tokens are in the history and whose accepted drafts are counted in the
        table."""

    def clear_history(self) -> None:
        """Drops everything kept of finished sequences, so that no text influences another one's drafts."""


class HostProposer:
    """Base of proposers that search tokens on the host. The device waits for them, so that their work is bounded."""

    max_work = MAX_WORK  # per step
    search_work = SEARCH_WORK  # fixed cost of one search
    _turn = 0  # index of the search that comes first, so that all get their turn

    def search(self, request: DraftRequest, find: Callable[[I32, int], I32]) -> Drafts | None:
        """Calls `find(tokens, max_drafts)` for the requested slots, as many as `max_work` covers, and returns the
        drafts found, None if there are none."""
        searches = [
            (slot, request.history.tokens_of(slot), most)
            for slot, most in zip(request.slots.tolist(), request.counts.tolist(), strict=True)
        ]
        work = [self.search_work + len(tokens) for _, tokens, _ in searches]
        return Drafts.of({slot: find(tokens, most) for slot, tokens, most in self.affordable(searches, work)})

    def affordable(self, searches: Sequence[T], work: Sequence[int]) -> Iterator[T]:
        """Yields as many searches, each with its `work` in tokens, as `max_work` covers, at least one, starting after
        the last one of the previous step, so that all get their turn."""
        budget = self.max_work
        for _ in searches:
            index = self._turn % len(searches)
            if budget < self.max_work and work[index] > budget:
                break
            self._turn = index + 1
            budget -= work[index]
            yield searches[index]

    def add_blocks(self, new: NewBlocks) -> None:
        """Does nothing: no state is kept by block."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Does nothing: no state is kept by block."""

    def start_sequence(self, slot: int) -> None:
        """Does nothing: no state is kept by slot."""

    def end_sequence(self, slot: int) -> None:
        """Does nothing: no state is kept by slot."""

    def record_step(self, inputs: StepInputs, output: RunnerOutput) -> None:
        """Does nothing: tokens are read from the history."""

    def clear_history(self) -> None:
        """Does nothing: no state outlives its sequence."""
