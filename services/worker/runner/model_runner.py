"""One step on the device: inputs up, forward, heads, results down. Launches; never waits for the device.

The last sampled token of every slot stays on the device, so that the next step can be launched before the tokens of
this one have reached the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.reference.low_rank import AdaptedRows
from quire.services.worker.device.device import Device
from quire.services.worker.device.staging import Staging, staging_for, upload
from quire.services.worker.device.step_timer import StepTimer
from quire.services.worker.graphs.chunk_graphs import ChunkGraphs
from quire.services.worker.graphs.decode_graphs import DecodeGraphs
from quire.services.worker.graphs.recorded_steps import ReadyStep, StepGraphs
from quire.services.worker.graphs.stage_graphs import SampleGraphs
from quire.services.worker.heads.heads import Heads, StepHeads
from quire.services.worker.heads.port import HeadLaunch
from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.kv.pages_ahead import PagesAhead
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.lora.adapters import NumberedAdapters
from quire.services.worker.runner.context_parallel import ContextParallel
from quire.services.worker.runner.output import Launch
from quire.services.worker.runner.pipeline import RunnerStage, StageLaunch
from quire.services.worker.runner.step_batches import StepBatches, Uploaded
from quire.services.worker.sampling.sampler import Sampled, Sampler
from quire.services.worker.step.beam_moves import BeamMoves
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.slot_memory import SlotMemory
from quire.services.worker.step.slots import NewBlocks, Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.services.worker.step.text_marks import TextMarks
from quire.services.worker.step.token_shares import TokenShares
from quire.shared.columns import I32

if TYPE_CHECKING:
    from quire.services.worker.layers.context import Context


class Model(Protocol):
    """Tokens to logits."""

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Hidden states [num_samples, hidden_size] of the tokens whose logits are wanted."""

    def logits(self, hidden: Tensor, *adapted: AdaptedRows) -> Tensor:
        """[num_samples, vocab_size]; `adapted`: which rows have adapters, if there are such."""


class ModelRunner:
    """Owns the model, its KV memory and everything by slot that lives on the device."""

    def __init__(
        self,
        model: Model,
        heads: Heads,
        device: Device,
        adapters: NumberedAdapters | None = None,
        marks: TextMarks | None = None,
    ) -> None:
        self.heads = heads
        self._stage: RunnerStage | None = None
        self._adapters = adapters
        self._whole_model = model  # what steps go through that nothing recorded takes
        self._model = model
        self._device = device
        self._staging: Staging = staging_for(device)
        self._marks = marks
        self._batches: StepBatches | None = None  # until there is memory
        self._context: ContextParallel | None = None
        self._timer = StepTimer(device)
        self.caches: list[LayerCache] = []
        self._pages: PagesAhead | None = None
        self.slot_memory = SlotMemory.none()
        self._none_sampled = Sampled(self.slot_memory.last_tokens, None)
        self._graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        self._sample_graphs: SampleGraphs | None = None

    @property
    def sampler(self) -> Sampler:
        return self.heads.sampling.sampler

    def prepare(self, caches: list[LayerCache], block_table: npt.NDArray[np.int32], num_groups: int = 0) -> None:
        """Takes the KV memory and the host's `block_table` [max_num_seqs, num_groups * max_blocks_per_seq]; forgets all
        recordings. `num_groups`: 0: each has a layer here.

        The CPU reads the table where it is; another device has a copy that every step brings up to date.
        """
        self.caches = caches
        self._graphs, self._chunk_graphs, self._sample_graphs, self._model = None, None, None, self._whole_model
        num_slots, width = block_table.shape
        device = self._device.torch_device
        tables = torch.from_numpy(block_table)
        if self._device.is_synchronous:
            self._pages = PagesAhead(caches)
        else:
            tables = torch.zeros((num_slots + 1, width), dtype=torch.int32, device=device)
        last_tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        num_groups = num_groups or 1 + max((cache.last_group for cache in caches), default=0)
        self.slot_memory = SlotMemory(tables, last_tokens, num_groups)
        self._none_sampled = Sampled(last_tokens[:0], None)
        self._batches = StepBatches(
            self._device, self._staging, caches, self.slot_memory, adapters=self._adapters, marks=self._marks
        )

    def use_stage(self, make: Callable[[StepTimer], RunnerStage | None]) -> None:
        """Steps go through a part of the layers, and the rest is elsewhere."""
        self._stage = make(self._timer)

    def use_context(self, context: Context) -> None:
        """Other ranks compute a part of the tokens of long steps."""
        if not context.is_whole:
            self._context = ContextParallel(context, self._adapters)

    def settle(self, slots: Rows | None = None) -> None:
        """Steps whose layers are elsewhere: those that name one of `slots`, and all before them; None: the oldest."""
        if self._stage is None:
            return
        if slots is None:
            self._stage.steps.settle_next()
        else:
            self._stage.steps.settle_of(slots)

    def use_graphs(self, graphs: DecodeGraphs) -> None:
        """Decode steps go through `graphs`, recorded over `caches` and `slot_memory`, until the next prepare()."""
        self._graphs = graphs

    def use_chunk_graphs(self, graphs: ChunkGraphs) -> None:
        """The same for small steps of other kinds."""
        self._chunk_graphs = graphs

    def use_sample_graphs(self, graphs: SampleGraphs) -> None:
        """The same for what steps of a first stage end in."""
        self._sample_graphs = graphs

    def use_model(self, model: Model) -> None:
        """Other steps go through `model`, recorded over `caches`, until the next prepare()."""
        self._model = model

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Before the next launch, and behind all earlier ones."""
        kv_cache.copy_blocks(self.caches, copies)

    def move_tokens(self, sources: I32, targets: I32) -> None:
        """What is kept of tokens, from place to place of the KV memory; before the next launch."""
        kv_cache.move_tokens(self.caches, sources, targets)

    def move_beams(self, moves: BeamMoves) -> None:
        """Before the next launch, which brings the blocks that are new."""
        memory, device = self.slot_memory, self._device.torch_device
        slots, parents, tokens = (upload(part, device) for part in (moves.slots, moves.parents, moves.token_ids))
        memory.last_tokens.index_copy_(0, slots, tokens)
        if not self._device.is_synchronous:  # else the host's tables are those that are read
            memory.block_tables.index_copy_(0, slots, memory.block_tables.index_select(0, parents))
        if self._graphs is not None:
            self._graphs.forget_rows()

    def launch(self, inputs: StepInputs, new_blocks: NewBlocks) -> StageLaunch:
        """Launches a step and returns without waiting for the device; on the CPU the step has then been computed.

        Steps are launched in their order, and each only after its copy_blocks() and move_beams(). `inputs` must stay
        unchanged until the step has been waited for, because the CPU reads the arrays where they are. Raises what the
        device raises: the slots' state on it is then unknown, and the attachment has to end.
        """
        if self._pages is not None and len(new_blocks.ids):
            self._pages.reach(int(new_blocks.ids.max()))
        if self._stage is not None:
            self._stage.steps.settle_for(inputs)
        heads = self.heads
        heads.begin()
        others = heads.of(inputs)
        if self._adapters is not None:
            self._adapters.write_rows(inputs)
        graphs = self._graphs_for(inputs, new_blocks, others)
        if self._adapters is not None:
            self._adapters.write_logit_rows(inputs, all_rows=graphs is not None and graphs is self._graphs)
        if graphs is not None:
            return self._launch_graph(graphs, inputs, new_blocks, others)
        return self._launch_kernels(inputs, new_blocks, others, self._model)

    def _graphs_for(self, inputs: StepInputs, new_blocks: NewBlocks, others: StepHeads | None) -> StepGraphs | None:
        """Recordings that have room for the step and can end in its heads; None if there are none. What drafts do to
        states has as many rows as it happens to have, and is recorded nowhere."""
        if self._graphs is not None and inputs.rows_changed:
            self._graphs.forget_rows()
        if inputs.lags is not None:
            return None
        if self._graphs is not None and others is None and self._graphs.takes(inputs, new_blocks):
            return self._graphs
        chunks = self._chunk_graphs
        if chunks is not None and (others is None or chunks.keeps_hidden) and chunks.takes(inputs, new_blocks):
            return chunks
        return None

    @property
    def _most_recorded(self) -> int:
        """Tokens of a step with chunks that a recording takes."""
        return self._chunk_graphs.most_tokens if self._chunk_graphs is not None else 0

    def _launch_kernels(
        self, inputs: StepInputs, new_blocks: NewBlocks, others: StepHeads | None, model: Model
    ) -> StageLaunch:
        """Kernel by kernel, or on the CPU as a tape, which can end in any head."""
        marks = self._timer.begin(short=False)
        assert self._batches is not None, "it is prepared"
        up = self._batches.upload(inputs, new_blocks)
        shares = None if self._context is None else self._context.shares(inputs, self._most_recorded)
        if shares is not None:
            self._timer.mark(marks)
            return self._end(inputs, up, others, self._shared(shares, self._batches, new_blocks, others), marks)
        wanted = self._wanted(inputs, up, others)
        is_recorded = model is not self._whole_model  # as a tape, which takes all tokens through all layers
        only_last = wanted is up.sampling_tokens and not is_recorded
        batch = self._batches.batch(inputs, up, wanted, only_last=only_last)
        self._timer.mark(marks)
        if self._stage is not None:
            part = self._stage.launched(batch, self.caches, inputs)
            return self._stage.steps.launch(part, inputs, partial(self._end, inputs, up, others, marks=marks), marks)
        hidden = model.forward(batch, self.caches) if inputs.num_tokens else None
        return self._end(inputs, up, others, hidden, marks)

    def _end(
        self,
        inputs: StepInputs,
        up: Uploaded | None,
        others: StepHeads | None,
        hidden: Tensor | None,
        marks: list[Any] | None,
    ) -> Launch:
        """`hidden` of the tokens that are wanted; None: the step has none. `up`: None of a step that a recording took,
        on the stage that has the other recordings, of what steps end in."""
        self._timer.mark(marks)
        sampled, endings = self._none_sampled, []
        if hidden is not None:
            if inputs.num_samples:
                sampled = self._sampled(inputs, up, others, hidden)
            if others is not None:
                endings = others.launch(hidden, inputs.num_samples, self._staging)
        return Launch(self._timer, marks, self._staging, sampled, drafts=inputs.drafts, endings=endings)

    def _sampled(self, inputs: StepInputs, up: Uploaded | None, others: StepHeads | None, hidden: Tensor) -> Sampled:
        """See _end()."""
        if others is None and self._sample_graphs is not None:
            step = self._sample_graphs.prepare(inputs, hidden)
            return self._chosen(step, step.forward(), inputs)
        assert up is not None, "recordings take steps whose samples others take"
        if others is not None:
            hidden = hidden.index_select(0, up.sampling_tokens) if others.read_all else hidden[: inputs.num_samples]
        adapted = self._adapters.logit_rows if self._adapters is not None else ()
        logits = self._model.logits(hidden, *adapted)
        slots, positions = up.sampling_slots, up.sample_positions
        sampled = self.heads.sampling.launch(logits, inputs, self.slot_memory, slots=slots, positions=positions)
        self._agree(sampled)
        return sampled

    def _launch_graph(
        self, graphs: StepGraphs, inputs: StepInputs, new_blocks: NewBlocks, others: StepHeads | None
    ) -> StageLaunch:
        marks = self._timer.begin(short=True)
        step = graphs.prepare(inputs, new_blocks)
        self._timer.mark(marks)
        if self._stage is not None:
            part = self._stage.recorded(step, inputs, self._staging)
            return self._stage.steps.launch(part, inputs, partial(self._end, inputs, None, others, marks=marks), marks)
        logits = step.forward()
        self._timer.mark(marks)
        sampled = self._chosen(step, logits, inputs)
        endings: list[HeadLaunch] = []
        if others is not None and step.hidden is not None:
            endings = others.launch_all(step.hidden, self._staging)
        return Launch(self._timer, marks, self._staging, sampled, drafts=inputs.drafts, endings=endings)

    def _chosen(self, step: ReadyStep, logits: Tensor, inputs: StepInputs) -> Sampled:
        """Behind what is recorded of `step`: in its recording, too, if that can be."""
        one_each = inputs.num_samples == inputs.num_rows if step.of_rows else inputs.drafts is None
        sampling = self.heads.sampling
        plain = sampling.plain(inputs.sampling_slots) if one_each and inputs.num_samples else None
        if plain is not None:
            plain.mask(logits)
            sampled = plain.settle(step.choose(plain.choice))
        elif inputs.num_samples:
            slots, positions, rows = self._staging.upload(
                [inputs.sampling_slots, inputs.sample_positions, inputs.sampling_tokens]
            )
            wanted = logits.index_select(0, rows) if step.of_rows else logits
            sampled = sampling.launch(wanted, inputs, self.slot_memory, slots=slots, positions=positions)
        else:
            sampled = self._none_sampled
        if inputs.num_samples:
            self._agree(sampled)
        return sampled

    def _wanted(self, inputs: StepInputs, up: Uploaded, others: StepHeads | None) -> Tensor | None:
        """int32 [num_wanted] tokens whose hidden states the heads read; None for all of them in their order."""
        if others is None:
            return None if inputs.num_samples == inputs.num_tokens else up.sampling_tokens
        if others.read_all:
            return None
        (tokens,) = self._staging.upload([others.wanted(inputs.sampling_tokens)])
        return tokens

    def _shared(
        self, shares: TokenShares, batches: StepBatches, new_blocks: NewBlocks, others: StepHeads | None
    ) -> Tensor:
        """The hidden states that the heads read, in the order in which they expect them."""
        assert self._context is not None, "it has shared them out"
        inputs, tokens = shares.inputs, shares.inputs.sampling_tokens
        if others is not None:
            all_tokens = np.arange(inputs.num_tokens, dtype=np.int32)
            tokens = all_tokens if others.read_all else others.wanted(tokens)
        forward = self._whole_model.forward
        return self._context.hidden(forward, shares, batches, new_blocks, tokens=tokens, only_samples=others is None)

    def _agree(self, sampled: Sampled) -> None:
        if self._context is not None:
            self._context.agree(sampled, self.slot_memory)
