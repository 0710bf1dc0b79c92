"""Records CUDA graphs of a model's steps from their parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.services.worker.device.staging import PinnedStaging, Staging
from quire.services.worker.graphs.chunk_graphs import ROWS, ChunkGraphs, chunk_shapes
from quire.services.worker.graphs.cuda_graph import CudaRecorder, Recorder
from quire.services.worker.graphs.decode_graphs import DecodeGraphs, graph_sizes
from quire.services.worker.graphs.recorded_steps import KeptHidden, RecordedModel
from quire.services.worker.graphs.row_facts import RowWatch
from quire.services.worker.graphs.stage_graphs import SampleGraphs, StageLayers
from quire.services.worker.graphs.step_edges import StepEdges, TritonStepEdges
from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.single_row import SingleRowProgram, model_reject_reason
from quire.services.worker.runner.model_runner import ModelRunner
from quire.services.worker.sampling.choice import PlainChoice
from quire.shared.logs import logger

log = logger("worker.graphs")


@dataclass(frozen=True, slots=True)
class RecordingTools:
    """Implementations with which steps are recorded: recorder, edges of a step, and staging; tests pass others."""

    recorder: Recorder
    edges: StepEdges
    new_staging: Callable[[], Staging]


def cuda_recording_tools(place: LayerPlacement) -> RecordingTools:
    """Returns the implementations that record real CUDA graphs, on the placement's device."""
    return RecordingTools(CudaRecorder(place.min_over_ranks), TritonStepEdges(), lambda: PinnedStaging(place.device))


class GraphBuilder:
    """Records the CUDA graphs of a loaded model's steps: decodes, chunks, and with pipeline stages the sampling."""

    def __init__(
        self,
        model: CausalLM,
        rows_per_prefix_tile: int,
        place: LayerPlacement,
        *,
        chunks: bool,
        samples_per_row: int,
        keeps_hidden: bool,
        has_trees: bool = False,
        tools: Callable[[LayerPlacement], RecordingTools] = cuda_recording_tools,
    ) -> None:
        """Prepares the recording.

        `chunks`: also record steps with chunks; `samples_per_row`: 1 plus drafts; `keeps_hidden`: steps may end in
        heads other than sampling; `has_trees`: drafts may be trees.
        """
        self._model, self._new_tools, self._has_trees = model, tools, has_trees
        self._keeps_hidden = keeps_hidden
        self._chunks, self._samples_per_row = chunks, samples_per_row
        self._rows_per_prefix_tile = rows_per_prefix_tile
        self._place = place
        self._most_chunk_tokens: int | None = None  # largest step for which a graph pays; None: not measured yet
        self._single_row: SingleRowProgram | None = None
        reason = model_reject_reason(model, place)
        if reason:
            log.info("single-row program is not used", reason=reason)
        else:
            from quire.kernels.triton.pdl import HAS_PDL

            pdl = HAS_PDL.of(torch.cuda.get_device_capability())
            self._single_row = SingleRowProgram(model, pdl=pdl)

    def record(
        self, runner: ModelRunner, limits: WorkerLimits, block_table: npt.NDArray[np.int32], most: int = 0
    ) -> None:
        """Records the `most` largest graphs of each kind (0: all) over the memory that `runner` has been prepared with,
        and makes the runner use them."""
        started = time.perf_counter()
        tools = self._new_tools(self._place)
        model = self._recorded(runner, limits, tools)
        graphs = DecodeGraphs(
            model,
            runner.slot_memory,
            graph_sizes(limits.max_num_seqs),
            watch=RowWatch(
                block_table, limits.block_size, self._rows_per_prefix_tile, num_kept=limits.num_micro_batches
            ),
            recorder=tools.recorder,
            staging=tools.new_staging(),
        )
        self._record_kinds(graphs, most)
        runner.use_graphs(graphs)
        log.info("decode graphs recorded", count=graphs.count, seconds=round(time.perf_counter() - started, 2))
        if self._chunks:
            self._record_chunks(runner, limits, model, tools, most)
        stage = self._place.stage
        if stage.is_first and not stage.is_whole:
            runner.use_sample_graphs(self._record_samples(runner, limits, tools, most))

    def _record_samples(
        self, runner: ModelRunner, limits: WorkerLimits, tools: RecordingTools, most: int
    ) -> SampleGraphs:
        """Records output head and sampling by number of rows, for the first pipeline stage, to which the last one
        returns its hidden states."""
        graphs = SampleGraphs(
            self._logits,
            PlainChoice(runner.sampler.vocabulary, limits.max_num_seqs, self._place.device),
            runner.slot_memory,
            graph_sizes(limits.max_num_seqs),
            hidden=torch.zeros(
                (limits.max_num_seqs, self._model.config.hidden_size),
                dtype=self._place.dtype,
                device=self._place.device,
            ),
            edges=tools.edges,
            recorder=tools.recorder,
            staging=tools.new_staging(),
        )
        graphs.record(most)
        return graphs

    def _record_chunks(
        self, runner: ModelRunner, limits: WorkerLimits, model: RecordedModel, tools: RecordingTools, most: int
    ) -> None:
        """Records steps with chunks up to the size for which a graph pays, which the first call measures, and makes the
        runner use them; records nothing if no shape remains."""
        started = time.perf_counter()
        most_tokens = self._most_chunk_tokens
        shapes = [
            shape
            for shape in chunk_shapes(limits, self._samples_per_row)
            if most_tokens is None or shape.num_tokens <= most_tokens
        ]
        if not shapes:
            return
        staging = tools.new_staging()
        if self._keeps_hidden:
            model = replace(model, hidden=self._kept_hidden(runner.caches, max(shape.num_tokens for shape in shapes)))
        graphs = ChunkGraphs(model, runner.slot_memory, shapes, recorder=tools.recorder, staging=staging)
        if most_tokens is None:
            graphs.leave_out_compute_bound()
            self._most_chunk_tokens = graphs.most_tokens
        self._record_kinds(graphs, most)
        runner.use_chunk_graphs(graphs)
        seconds = round(time.perf_counter() - started, 2)
        log.info("chunk graphs recorded", count=graphs.count, most_tokens=graphs.most_tokens, seconds=seconds)

    def _record_kinds(self, graphs: DecodeGraphs | ChunkGraphs, most: int) -> None:
        """Records steps without adapters and, if adapters are enabled, steps with them."""
        graphs.record(most)
        if self._place.adapters is not None:
            with self._place.adapters.step.recording_with(True):
                graphs.record(most)

    def _kept_hidden(self, caches: list[LayerCache], most_tokens: int) -> KeptHidden:
        """Returns forward pass and output head as separate functions, with the memory in which a graph keeps the hidden
        states for other heads."""
        size = most_tokens, self._model.hidden_width
        memory = torch.zeros(size, dtype=self._place.dtype, device=self._place.device)
        return KeptHidden(lambda batch: self._model.forward(batch, caches), self._logits, memory)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Computes the logits of the rows that a step's output head reads, with their adapters."""
        adapters = self._place.adapters
        return self._model.logits(hidden, *(adapters.logit_rows if adapters is not None else ()))

    def _recorded(self, runner: ModelRunner, limits: WorkerLimits, tools: RecordingTools) -> RecordedModel:
        """Returns what a graph records of the whole model: forward pass with logits (for a single row the fused chain,
        if there is one), choice and step edges."""
        if not self._place.stage.is_whole:
            return self._recorded_stage(runner.caches, limits, tools)
        caches = runner.caches

        def logits(batch: ForwardBatch) -> Tensor:
            """Computes the logits of a batch: by the fused chain for a single row, if there is one, else by the
            model."""
            if self._single_row is not None and batch.token_ids.size(0) == 1:
                return self._single_row.logits(batch, caches)
            return self._logits(self._model.forward(batch, caches))

        most_rows = max(limits.max_num_seqs, *ROWS) if self._chunks else limits.max_num_seqs
        return RecordedModel(
            forward=logits,
            choice=PlainChoice(runner.sampler.vocabulary, most_rows, self._place.device),
            edges=tools.edges,
            max_seq_len=limits.max_model_len,
            rows_per_prefix_tile=self._rows_per_prefix_tile,
            adapters=self._place.adapters.step if self._place.adapters else None,
            has_trees=self._has_trees,
            cross_length=limits.layout.cross_length,
        )

    def _recorded_stage(self, caches: list[LayerCache], limits: WorkerLimits, tools: RecordingTools) -> RecordedModel:
        """Returns what a graph records of one pipeline stage: its layers, without choice."""
        shapes = chunk_shapes(limits, self._samples_per_row) if self._chunks else []
        layers = StageLayers(
            self._model,
            caches,
            self._single_row,
            most_tokens=max([limits.max_num_seqs, *(shape.num_tokens for shape in shapes)]),
            dtype=self._place.dtype,
            device=self._place.device,
        )
        return RecordedModel(
            forward=layers.forward,
            choice=None,
            edges=tools.edges,
            max_seq_len=limits.max_model_len,
            rows_per_prefix_tile=self._rows_per_prefix_tile,
            stage=layers.recorded,
        )
