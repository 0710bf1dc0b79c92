"""Ports by which a runner distributes tokens and layers of a step, and their single-rank implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quire.services.worker.graphs.recorded_steps import ReadyStep
    from quire.services.worker.graphs.recordings import Recordings
    from quire.services.worker.heads.heads import StepHeads
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.runner.step_batches import StepBatches
    from quire.services.worker.runner.step_ending import EndStep, StageLaunch, StepEnding
    from quire.services.worker.sampling.sampler import SampledTokens
    from quire.services.worker.step.slot_memory import SlotMemory
    from quire.services.worker.step.slots import NewBlocks, Rows
    from quire.services.worker.step.step_inputs import StepInputs
    from quire.services.worker.step.token_shares import TokenShares
    from quire.shared.columns import I32


class Forward(Protocol):
    """Model whose layers map a batch to hidden states."""

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor: ...


class StepLayers(Protocol):
    """Launches this rank's layers, and the heads once the hidden states are available."""

    def launch(
        self,
        model: Forward,
        batch: ForwardBatch,
        caches: list[LayerCache],
        inputs: StepInputs,
        *,
        end: EndStep,
        marks: list[Any] | None,
    ) -> StageLaunch:
        """Launches this rank's layers kernel by kernel, or as a tape, and passes the hidden states to `end`, which
        launches the heads.

        On a pipeline stage `end` runs later or never. `marks`: the step's timer marks (StepTimer).
        """

    def replay(
        self, step: ReadyStep, inputs: StepInputs, ending: StepEnding, step_heads: StepHeads, marks: list[Any] | None
    ) -> StageLaunch:
        """Replays the recording `step`; `ending` launches the heads in `step_heads`, later or never on a pipeline
        stage."""

    def launch_oldest_heads(self) -> None:
        """Launches the heads of the oldest step that waits for remote layers."""

    def launch_heads_of(self, slots: Rows) -> None:
        """Launches the heads of steps that name one of `slots`, and of all earlier ones."""


class StepContext(Protocol):
    """Decides whether context-parallel ranks partition the tokens of a step (shares), computes the hidden states of a
    partitioned step (hidden), and makes all ranks use the same samples (agree)."""

    def shares(self, inputs: StepInputs, recordings: Recordings) -> TokenShares | None:
        """Partitions the step; None if each rank computes it by itself."""

    def hidden(
        self,
        forward: Callable[[ForwardBatch, list[LayerCache]], Tensor],
        shares: TokenShares,
        batches: StepBatches,
        new_blocks: NewBlocks,
        *,
        tokens: I32,
        only_samples: bool,
    ) -> Tensor: ...

    def agree(self, sampled: SampledTokens, memory: SlotMemory) -> None: ...


class LocalLayers:
    """Runs all layers on this rank: the heads are launched at once, and no step waits for other ranks."""

    def launch(
        self,
        model: Forward,
        batch: ForwardBatch,
        caches: list[LayerCache],
        inputs: StepInputs,
        *,
        end: EndStep,
        marks: list[Any] | None,
    ) -> StageLaunch:
        """Runs the model and launches the heads at once; a step without tokens runs no layers."""
        return end(model.forward(batch, caches) if inputs.num_tokens else None)

    def replay(
        self, step: ReadyStep, inputs: StepInputs, ending: StepEnding, step_heads: StepHeads, marks: list[Any] | None
    ) -> StageLaunch:
        """Replays the recording including its logits, then samples and launches the other heads."""
        return ending.end_recorded(step, inputs, step_heads, marks)

    def launch_oldest_heads(self) -> None:
        """Does nothing: heads are launched with their step."""

    def launch_heads_of(self, slots: Rows) -> None:
        """Does nothing: heads are launched with their step."""


class LocalSteps:
    """Context of a single rank, or of ranks that all compute the whole step: partitions nothing."""

    def shares(self, inputs: StepInputs, recordings: Recordings) -> None:
        return None

    def hidden(
        self,
        forward: Callable[[ForwardBatch, list[LayerCache]], Tensor],
        shares: TokenShares,
        batches: StepBatches,
        new_blocks: NewBlocks,
        *,
        tokens: I32,
        only_samples: bool,
    ) -> Tensor:
        """Raises AssertionError: shares() never partitions a step."""
        raise AssertionError("no step is shared out")

    def agree(self, sampled: SampledTokens, memory: SlotMemory) -> None:
        """Does nothing: there are no context-parallel ranks."""
