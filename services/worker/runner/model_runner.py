"""Launches one step on the device: upload inputs, forward, heads, download results. Never waits for the device.

The last sampled token of every slot stays on the device, so the next step can be launched before the tokens of this one
have reached the host.
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
from quire.services.worker.graphs.recorded_steps import ReadyStep, StepGraphs
from quire.services.worker.graphs.recordings import Recordings
from quire.services.worker.graphs.stage_graphs import SampleGraphs
from quire.services.worker.heads.heads import Heads, StepHeads
from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.kv.page_prefaulter import PagePrefaulter
from quire.services.worker.layers.forward_batch import ForwardBatch, MediaRows
from quire.services.worker.lora.no_adapters import NO_ADAPTERS, StepAdapters
from quire.services.worker.media.cross_media import CrossMedia
from quire.services.worker.media.step_media import NO_STEP_MEDIA, NoStepMedia, StepMedia
from quire.services.worker.runner.component import Forward, RunnerComponent, StepContext, StepLayers
from quire.services.worker.runner.context_parallel import ContextParallel
from quire.services.worker.runner.pipeline import RunnerStage
from quire.services.worker.runner.step_batches import StepBatches, Uploaded
from quire.services.worker.runner.step_ending import EndStep, StageLaunch, StepEnding
from quire.services.worker.sampling.sampler import SampledTokens, Sampler
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
    from quire.services.worker.media.encoder_cache import EncoderCache


class Model(Protocol):
    """Model as the runner uses it: tokens to hidden states to logits."""

    def forward(self, batch: ForwardBatch, caches: list[LayerCache]) -> Tensor:
        """Returns the hidden states [num_samples, hidden_size] of the tokens whose logits are wanted."""

    def logits(self, hidden: Tensor, *adapted: AdaptedRows) -> Tensor:
        """Returns logits [num_samples, vocab_size]; `adapted`: rows with adapters, if there are any."""


class EncoderDecoder(Protocol):
    """Model whose decoder attends to the output of an encoder."""

    def store_cross(self, rows: Tensor, tokens: Tensor, caches: list[LayerCache]) -> None:
        """Computes keys and values of each layer from `rows` [num_rows, row width] and writes them to the places
        `tokens` (block * block_size + offset), int64 [num_rows]."""


class ModelRunner:
    """Owns the model, its KV memory and the per-slot state on the device. Steps require a prior prepare()."""

    _batches: StepBatches
    _ending: StepEnding
    slot_memory: SlotMemory

    def __init__(
        self,
        model: Model,
        heads: Heads,
        device: Device,
        adapters: StepAdapters = NO_ADAPTERS,
        marks: TextMarks | None = None,
    ) -> None:
        self.heads, self.adapters = heads, adapters
        self._eager_model = model  # for steps without a recording
        self._model = model
        self._device = device
        self._staging: Staging = staging_for(device)
        self._marks = marks
        self.media: StepMedia | NoStepMedia | CrossMedia = NO_STEP_MEDIA
        self._context: StepContext = LocalSteps()
        self._layers: StepLayers = LocalLayers()
        self._components: list[RunnerComponent] = []
        self._timer = StepTimer(device)
        self.caches: list[LayerCache] = []
        self._pages: list[PagePrefaulter] = []
        self.recordings = Recordings()

    @property
    def sampler(self) -> Sampler:
        return self.heads.sampling.sampler

    def prepare(
        self, caches: list[LayerCache], block_table: npt.NDArray[np.int32], num_groups: int = 0, *, cross_width: int = 0
    ) -> None:
        """Sets the KV caches and the host's `block_table` [max_num_seqs, num_groups * max_blocks_per_seq +
        cross_width], allocates the per-slot state on the device and discards all recordings.

        `num_groups`: number of KV groups; 0: derived from `caches`, if every group has a layer on this rank. The CPU
        reads the table in place; other devices have a copy that every step updates.
        """
        self.caches, self._model, self.recordings = caches, self._eager_model, Recordings()
        num_slots, width = block_table.shape
        device = self._device.torch_device
        tables = torch.from_numpy(block_table)
        if self._device.is_synchronous:
            self._pages = [PagePrefaulter(caches)]
        else:
            tables = torch.zeros((num_slots + 1, width), dtype=torch.int32, device=device)
        last_tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        num_groups = num_groups or 1 + max((cache.last_group for cache in caches), default=0)
        self.slot_memory = SlotMemory(tables, last_tokens, num_groups, cross_width)
        self._batches = StepBatches(
            self._device, self._staging, caches, self.slot_memory, adapters=self.adapters, marks=self._marks
        )
        self._ending = StepEnding(
            self._model,
            self.heads,
            self.slot_memory,
            staging=self._staging,
            timer=self._timer,
            adapters=self.adapters,
            context=self._context,
            recordings=self.recordings,
        )

    def use_stage(self, make: Callable[[StepTimer, Staging], RunnerStage]) -> None:
        """Makes steps run one pipeline stage's layers, made by `make` from the runner's timer and staging buffers.

        Call before prepare().
        """
        stage = make(self._timer, self._staging)
        self._layers = stage
        self._components.insert(0, stage)  # its waits come before other components

    def use_context(self, context: Context) -> None:
        """Enables context parallelism for long steps. Call before prepare()."""
        self._context = ContextParallel(context, self.adapters)

    def use_media(self, media: StepMedia) -> None:
        """Enables rows of media in prompts."""
        self.media = media

    def use_cross_attention(self, cache: EncoderCache, model: EncoderDecoder) -> None:
        """Enables the output of an encoder, whose rows are in `cache`, as what the decoder `model` attends to."""

        def store(rows: Tensor, block_ids: I32) -> None:
            """Writes the keys and values of `rows` into these blocks of all layers."""
            places = block_ids[:, None] * self._block_size + np.arange(self._block_size)
            tokens = places.reshape(-1)[: rows.size(0)]
            model.store_cross(rows, upload(tokens, self._device.torch_device, np.int64), self.caches)

        self.media = CrossMedia(cache, store)

    def cross_keys(self, layer: int, slot: int, num_rows: int) -> Tensor:
        """Returns a layer's keys of the encoder's output that a slot attends to, [num_rows, num_kv_heads, head_dim]."""
        cross = self.caches[layer].cross
        assert cross is not None, "every layer attends to the encoder's output"
        blocks = self.slot_memory.cross_tables[slot, : -(-num_rows // self._block_size)]
        return cross.k.index_select(0, blocks).flatten(0, 1)[:num_rows]

    @property
    def _block_size(self) -> int:
        return int(self.caches[0].k.size(1))

    def add_component(self, component: RunnerComponent) -> None:
        """Appends a component that prepares each later step, after those added before."""
        self._components.append(component)

    def launch_pending_heads(self, slots: Rows | None = None) -> None:
        """Launches the heads of pending pipeline steps: up to the last one that names one of `slots`; None: the
        oldest."""
        if slots is None:
            self._layers.launch_oldest_heads()
        else:
            self._layers.launch_heads_of(slots)

    def use_graphs(self, graphs: StepGraphs) -> None:
        """Runs decode steps through `graphs`, recorded over `caches` and `slot_memory`, until the next prepare()."""
        self.recordings.use_decodes(graphs)

    def use_chunk_graphs(self, graphs: StepGraphs) -> None:
        """Runs small steps with chunks through `graphs`, until the next prepare()."""
        self.recordings.use_chunks(graphs)

    def use_sample_graphs(self, graphs: SampleGraphs) -> None:
        """Runs the heads of a first stage's steps through `graphs`, until the next prepare()."""
        self.recordings.samples = graphs

    def use_model(self, model: Model) -> None:
        """Runs steps without a CUDA graph through `model`, recorded over `caches`, until the next prepare()."""
        self._model = self._ending.model = model

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies KV blocks after all launched steps and before the next launch."""
        kv_cache.copy_blocks(self.caches, copies)

    def move_tokens(self, sources: I32, targets: I32) -> None:
        """Moves KV entries of tokens between cache positions; before the next launch."""
        kv_cache.move_tokens(self.caches, sources, targets)

    def move_beams(self, moves: BeamMoves) -> None:
        """Gives beams their parents' block tables and last tokens; the next launch brings their new blocks."""
        memory, device = self.slot_memory, self._device.torch_device
        slots, parents, tokens = (upload(part, device) for part in (moves.slots, moves.parents, moves.token_ids))
        memory.last_tokens.index_copy_(0, slots, tokens)
        if not self._device.is_synchronous:  # synchronous devices read the host's tables
            memory.block_tables.index_copy_(0, slots, memory.block_tables.index_select(0, parents))
        self.recordings.forget_rows()

    def launch(self, inputs: StepInputs, new_blocks: NewBlocks) -> StageLaunch:
        """Launches a step and returns without waiting for the device; on the CPU the step is then complete.

        Steps are launched in order, each after its copy_blocks() and move_beams(). `inputs` must stay unchanged until
        the step has been waited for, because the CPU reads the arrays in place. Raises device errors: the slots' state
        on the device is then unknown and the attachment has to end.
        """
        if len(new_blocks.ids):
            for pages in self._pages:
                pages.prefault_for(int(new_blocks.ids.max()))
        for component in self._components:
            component.prepare_step(inputs)
        heads = self.heads
        heads.prepare_step()
        step_heads = heads.for_step(inputs)
        media = self.media.rows(inputs) if self.media.pending else None
        graphs = self._recording(inputs, new_blocks, step_heads, media)
        for component in self._components:
            component.prepare_launch(inputs, one_token_per_row=graphs is not None and graphs.one_token_per_row)
        if graphs is not None:
            return self._launch_graph(graphs, inputs, new_blocks, step_heads)
        return self._launch_kernels(inputs, new_blocks, step_heads, media)

    def _recording(
        self, inputs: StepInputs, new_blocks: NewBlocks, step_heads: StepHeads, media: MediaRows | None
    ) -> StepGraphs | None:
        """Returns the recordings that have room for the step; None for steps with rows of media, which recordings do
        not read."""
        if not self.recordings.kinds:
            return None
        if media is None:
            return self.recordings.find(inputs, new_blocks, samples_alone=not step_heads.rows)
        self.recordings.forget_rows()
        return None

    def _launch_kernels(
        self, inputs: StepInputs, new_blocks: NewBlocks, step_heads: StepHeads, media: MediaRows | None
    ) -> StageLaunch:
        """Launches a step without a recording: kernel by kernel, or on the CPU as a tape, which supports all heads.

        A step that context-parallel ranks partition, or with rows of media, always runs the eager model.
        """
        model = self._model if media is None else self._eager_model
        marks = self._timer.begin(short=False)
        batches = self._batches
        up = batches.upload(inputs, new_blocks)
        end = partial(self._ending.end, inputs, up, step_heads, marks=marks)
        shares = self._context.shares(inputs, self.recordings)
        if shares is not None:
            self._timer.mark(marks)
            return end(self._shared(shares, new_blocks, step_heads))
        wanted = self._wanted(inputs, up, step_heads)
        is_recorded = model is not self._eager_model  # a tape runs all tokens through all layers
        only_last = wanted is up.sampling_tokens and not is_recorded
        batch = batches.batch(inputs, up, wanted, only_last=only_last)
        if media is not None:
            batch = batch.with_media(media)
        self._timer.mark(marks)
        return self._layers.launch(model, batch, self.caches, inputs, end=end, marks=marks)

    def _launch_graph(
        self, graphs: StepGraphs, inputs: StepInputs, new_blocks: NewBlocks, step_heads: StepHeads
    ) -> StageLaunch:
        """Uploads the step's inputs into a recording of `graphs` and replays it; the heads follow."""
        marks = self._timer.begin(short=True)
        step = graphs.prepare(inputs, new_blocks)
        self._timer.mark(marks)
        return self._layers.replay(step, inputs, self._ending, step_heads, marks)

    def _wanted(self, inputs: StepInputs, up: Uploaded, step_heads: StepHeads) -> Tensor | None:
        """Returns the tokens whose hidden states the heads read, int32 [num_wanted]; None: all, in order."""
        if not step_heads.rows:
            return None if inputs.num_samples == inputs.num_tokens else up.sampling_tokens
        if step_heads.reads_all_tokens:
            return None
        (tokens,) = self._staging.upload([step_heads.required_tokens(inputs.sampling_tokens)])
        return tokens

    def _shared(self, shares: TokenShares, new_blocks: NewBlocks, step_heads: StepHeads) -> Tensor:
        """Returns the hidden states that the heads read, in the order they expect, from all context-parallel ranks."""
        inputs, tokens = shares.inputs, shares.inputs.sampling_tokens
        if step_heads.rows:
            all_tokens = np.arange(inputs.num_tokens, dtype=np.int32)
            tokens = all_tokens if step_heads.reads_all_tokens else step_heads.required_tokens(tokens)
        forward = self._eager_model.forward
        only = not step_heads.rows
        return self._context.hidden(forward, shares, self._batches, new_blocks, tokens=tokens, only_samples=only)


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
        """Returns None: the step is not partitioned."""
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
        raise AssertionError("a step without shares has no partition")

    def agree(self, sampled: SampledTokens, memory: SlotMemory) -> None:
        """Does nothing: there are no context-parallel ranks."""
