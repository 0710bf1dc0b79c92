"""A step in flight: its launch on the device and the result built from its output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from quire.services.worker.kv.block_contents import BlockContents
from quire.services.worker.lora.no_adapters import StepAdapters
from quire.services.worker.media.step_media import SlotMedia
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
    """A launched step, whose result is waited for on a waiting thread."""

    @property
    def heads_launched(self) -> bool:
        """Whether everything of the step is launched. A step of several stages launches its heads only when the other
        stages are done: Replica.launch_pending_heads()."""

    def await_remote_stages(self) -> None:
        """Blocks until the heads can be launched without waiting; called on a waiting thread."""

    def wait(self) -> RunnerOutput: ...


class RunnerHeads(SlotState, Protocol):
    """Per-slot state of the heads."""

    @property
    def num_query_vectors(self) -> int:
        """Capacity for cached query vectors (late interaction)."""

    def drop_queries(self, names: bytes) -> None:
        """Drops cached query vectors before the next launch."""

    def clear_queries(self) -> None: ...


class Runner(Protocol):
    """Executes steps on the device; used on the device thread."""

    @property
    def heads(self) -> RunnerHeads: ...

    @property
    def media(self) -> SlotMedia:
        """Media items of the slots."""

    @property
    def adapters(self) -> StepAdapters:
        """LoRA adapters that steps may use."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies blocks before the next launch."""

    def move_beams(self, moves: BeamMoves) -> None:
        """Moves beam state before the next launch."""

    def move_tokens(self, sources: I32, targets: I32) -> None:
        """Copies KV of tokens between places of the KV memory, before the next launch."""

    def launch(self, inputs: StepInputs, new_blocks: NewBlocks) -> Launch: ...

    def launch_pending_heads(self, slots: Rows | None = None) -> None:
        """Launches the heads of steps that name one of `slots` and of all steps before them; None: of the
        oldest step."""


@step_value
class StepChanges:
    """Changes of a plan other than scheduled tokens."""

    stalled: Rows  # slots that would have sampled but were not scheduled
    copies: BlockCopies | None
    moves: BeamMoves | None

    def apply_to_device(self, runner: Runner) -> None:
        """Applies block copies and beam moves on the device before the step is launched."""
        if self.copies is not None:
            runner.copy_blocks(self.copies)
        if self.moves is not None:
            runner.launch_pending_heads(self.moves.slots)
            runner.move_beams(self.moves)

    def apply_to_host(self, contents: BlockContents, last_tokens: I32) -> None:
        """Applies the changes to the host's records after the step; `last_tokens`: by slot."""
        if self.copies is not None:
            contents.record_copies(self.copies.sources, self.copies.targets)
        if self.moves is not None:
            last_tokens[self.moves.slots] = self.moves.token_ids


NO_STEP_CHANGES = StepChanges(NO_SLOTS, None, None)
NO_REFUSALS: dict[int, QuireError] = {}


class StepInFlight(NamedTuple):
    """A step between launch and record, with what its result is built from."""

    epoch: int
    step_id: int
    inputs: StepInputs
    launch: Launch
    refused: dict[int, QuireError]  # slots that sample or end in this step and whose admission was refused
    bans: Mapping[int, tuple[str, ...]]  # of slots now: see SlotAdmission
    changes: StepChanges
    num_begun: int  # sequences by then, for speculation

    def result(self, output: RunnerOutput, wait_us: int) -> StepResult:
        """Builds the step's result for the scheduler from the device's output, including failures of single sequences.
        `wait_us`: time that the plan was queued."""
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
        """Expands counts to all slots expected to sample, with 0 for those not scheduled."""
        slots = self.inputs.sampled_slots
        expected = np.sort(np.concatenate([slots, self.changes.stalled]))
        column = np.zeros(len(expected), dtype=np.uint32)
        column[np.searchsorted(expected, slots)] = counts
        return column

    def _failures(self, output: RunnerOutput) -> list[tuple[int, QuireError]]:
        """Returns (slot, error) of sequences that failed in this step: no token could be sampled, a fault of the
        output, or a refused admission, the latter taking precedence."""
        failures: dict[int, QuireError] = {}
        lost = (output.token_ids < 0).nonzero()[0]
        if len(lost):
            slots = np.repeat(self.inputs.sampled_slots, output.token_counts)[lost].tolist()
            failures = {slot: self._nothing_to_sample(slot) for slot in slots}
        return [*(failures | dict(output.faults) | self.refused).items()]

    def _nothing_to_sample(self, slot: int) -> QuireError:
        """Returns the error of a slot without a sampled token: InvalidArgument if its request bans every token, else
        Internal."""
        if bans := self.bans.get(slot):
            first, *others = bans
            verb = "allow" if first == "allowed_token_ids" else "allows"
            text = f"every token is banned: none that {first} {verb} is permitted by {' and '.join(others)}"
            return InvalidArgument(text, field=first)
        return Internal("no token could be sampled: the logits hold NaN or infinity, or every token is banned")
