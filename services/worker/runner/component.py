"""Ports of a runner's parts: optional ones that are called in order with each step, and those that distribute the
tokens and layers of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quire.services.worker.lora.no_adapters import StepAdapters
from quire.services.worker.step.step_inputs import StepInputs

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
    from quire.services.worker.step.token_shares import TokenShares
    from quire.shared.columns import I32


class RunnerComponent(Protocol):
    """Optional part of a runner, such as adapters or a pipeline stage, called twice with every step before its kernels
    are launched."""

    def prepare_step(self, inputs: StepInputs) -> None:
        """Runs before anything of the step is launched."""

    def prepare_launch(self, inputs: StepInputs, *, one_token_per_row: bool) -> None:
        """Runs after the runner has chosen between a recording and eager kernels.

        `one_token_per_row`: the step replays a recording whose output head reads every row, not only the sampled
        tokens.
        """


class AdapterRows:
    """Uploads which LoRA adapter each token and each logits row of a step uses."""

    def __init__(self, adapters: StepAdapters) -> None:
        self._adapters = adapters

    def prepare_step(self, inputs: StepInputs) -> None:
        """Uploads the adapter of each token of the step."""
        self._adapters.write_rows(inputs)

    def prepare_launch(self, inputs: StepInputs, *, one_token_per_row: bool) -> None:
        """Uploads the adapter of each logits row: all rows of a recorded decode step, else the sampled tokens."""
        self._adapters.write_logit_rows(inputs, all_rows=one_token_per_row)


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
