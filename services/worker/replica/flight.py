"""A step under way on a replica: what the device makes of it, and the result that it ends in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from quire.services.worker.kv.block_contents import BlockContents
from quire.services.worker.lora.no_adapters import StepAdapters
from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.sampling.features.component import SlotState
from quire.services.worker.step.beam_moves import BeamMoves
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.result import StepResult
from quire.services.worker.step.slots import NO_SLOTS, NewBlocks, Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32, U32
from quire.shared.errors import Internal, InvalidArgument, QuireError
from quire.shared.step_value import step_value


class Launch(Protocol):
    """A step under way."""

    @property
    def heads_launched(self) -> bool:
        """Whether all of it is launched. A step whose layers are shared out among stages is so only when they are done:
        Replica.launch_pending_heads()."""

    def await_remote_stages(self) -> None:
        """Until it can be settled without waiting. On a thread that has nothing else to do."""

    def wait(self) -> RunnerOutput: ...


class RunnerHeads(SlotState, Protocol):
    """What each slot's passes end in."""

    @property
    def num_query_vectors(self) -> int:
        """Vectors of queries that are kept for documents."""

    def drop_queries(self, names: bytes) -> None:
        """Before the next launch."""

    def clear_queries(self) -> None: ...


class Runner(Protocol):
    """The device's side of a step."""

    @property
    def heads(self) -> RunnerHeads: ...

    @property
    def adapters(self) -> StepAdapters:
        """Those that steps may go through."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Before the next launch."""

    def move_beams(self, moves: BeamMoves) -> None:
        """Before the next launch."""

    def move_tokens(self, sources: I32, targets: I32) -> None:
        """What is kept of tokens, from place to place of the KV memory; before the next launch."""

    def launch(self, inputs: StepInputs, new_blocks: NewBlocks) -> Launch: ...

    def launch_pending_heads(self, slots: Rows | None = None) -> None:
        """Launches are settled: those that name one of `slots`, and all before them; None: the oldest."""


@step_value
class StepChanges:
    """What a plan says besides who computes what."""

    stalled: Rows  # slots that would have sampled if they had had room
    copies: BlockCopies | None
    moves: BeamMoves | None

    def apply_to_device(self, runner: Runner) -> None:
        """On the device, before the step is launched."""
        if self.copies is not None:
            runner.copy_blocks(self.copies)
        if self.moves is not None:
            runner.launch_pending_heads(self.moves.slots)
            runner.move_beams(self.moves)

    def apply_to_host(self, contents: BlockContents, last_tokens: I32) -> None:
        """On the host, once the step has been executed; `last_tokens`: by slot."""
        if self.copies is not None:
            contents.record_copies(self.copies.sources, self.copies.targets)
        if self.moves is not None:
            last_tokens[self.moves.slots] = self.moves.token_ids


NO_STEP_CHANGES = StepChanges(NO_SLOTS, None, None)
NO_REFUSALS: dict[int, QuireError] = {}


class StepInFlight(NamedTuple):
    """A step between launch and record."""

    epoch: int
    step_id: int
    inputs: StepInputs
    launch: Launch
    refused: dict[int, QuireError]  # sampling or ending slots that were admitted with something that cannot be done
    bans: Mapping[int, tuple[str, ...]]  # of slots now: see SlotAdmission
    changes: StepChanges
    num_begun: int  # sequences by then, for speculation

    def result(self, output: RunnerOutput, wait_us: int) -> StepResult:
        drafts = self.inputs.drafts
        has_counts = len(self.changes.stalled) or output.drafted
        is_whole = not (output.faults or self.refused) and output.token_ids.min(initial=0) >= 0
        result = StepResult(
            self.epoch,
            self.step_id,
            output.token_ids,
            self._column(output.token_counts) if has_counts else None,
            self._column(drafts.counts) if drafts else None,
            [] if is_whole else self._failures(output),
            wait_us,
            output.timings,
            output.logprobs,
        )
        for answer in output.answers:
            result = answer.merge_into(result)
        return result

    def _column(self, counts: I32) -> U32:
        """Of the slots that sampled, with those that sat out among them: 0."""
        slots = self.inputs.sampled_slots
        expected = np.sort(np.concatenate([slots, self.changes.stalled]))
        column = np.zeros(len(expected), dtype=np.uint32)
        column[np.searchsorted(expected, slots)] = counts
        return column

    def _failures(self, output: RunnerOutput) -> list[tuple[int, QuireError]]:
        failures: dict[int, QuireError] = {}
        lost = (output.token_ids < 0).nonzero()[0]
        if len(lost):
            slots = np.repeat(self.inputs.sampled_slots, output.token_counts)[lost].tolist()
            failures = {slot: self._nothing_to_sample(slot) for slot in slots}
        return [*(failures | dict(output.faults) | self.refused).items()]

    def _nothing_to_sample(self, slot: int) -> QuireError:
        if bans := self.bans.get(slot):
            first, *others = bans
            verb = "allow" if first == "allowed_token_ids" else "allows"
            text = f"every token is banned: none that {first} {verb} may be sampled beside {' and '.join(others)}"
            return InvalidArgument(text, field=first)
        return Internal("no token could be sampled: the logits hold NaN or infinity, or every token is banned")
