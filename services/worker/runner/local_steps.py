"""Which tokens and which layers of a step are computed where: what a runner asks, and the answers of a rank that has
all of them."""

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
    """A model's layers."""

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor: ...


class StepLayers(Protocol):
    """Launches the layers that are here, and what the step ends in if its hidden states are."""

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
        """Kernel by kernel, or as a tape."""

    def replay(
        self, step: ReadyStep, inputs: StepInputs, ending: StepEnding, others: StepHeads, marks: list[Any] | None
    ) -> StageLaunch:
        """As it has been recorded."""

    def launch_oldest_heads(self) -> None:
        """Settles the oldest step that waits for layers elsewhere."""

    def launch_heads_of(self, slots: Rows) -> None:
        """Settles those that name one of `slots`, and all before them."""


class StepContext(Protocol):
    """Whether ranks share out the tokens of a step."""

    def shares(self, inputs: StepInputs, recordings: Recordings) -> TokenShares | None:
        """None where each rank computes the step by itself."""

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
    """All layers are here: no step waits for others."""

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
        return end(model.forward(batch, caches) if inputs.num_tokens else None)

    def replay(
        self, step: ReadyStep, inputs: StepInputs, ending: StepEnding, others: StepHeads, marks: list[Any] | None
    ) -> StageLaunch:
        return ending.end_recorded(step, inputs, others, marks)

    def launch_oldest_heads(self) -> None:
        """No step waits."""

    def launch_heads_of(self, slots: Rows) -> None:
        """No step waits."""


class LocalSteps:
    """Each rank computes all tokens of a step."""

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
        raise AssertionError("no step is shared out")

    def agree(self, sampled: SampledTokens, memory: SlotMemory) -> None:
        """What is chosen here counts."""
