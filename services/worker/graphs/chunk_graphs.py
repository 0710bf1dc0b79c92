"""CUDA graphs of steps with chunks: parts of prompts, or drafts, in one launch.

Launched kernel by kernel, such a step takes 9 to 15 ms of Python regardless of its size (28 layers, an H200's host);
small ones take the GPU 1 or 2 ms. Steps that compute longer than they launch are not recorded: padding would only add
work. A graph has fixed numbers of tokens and rows. Surplus tokens form a prompt of the scratch slot after the last one,
which stores into the null block; surplus rows have no tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.attention.port import AttentionMetadata
from quire.services.worker.device.staging import Array, Staging, aligned, as_words
from quire.services.worker.graphs.cuda_graph import Recorder
from quire.services.worker.graphs.recorded_steps import ReadyStep, RecordedModel, RecordedStep
from quire.services.worker.graphs.step_edges import LAST_SAMPLED
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.sampling.choice import PlainChoice
from quire.services.worker.step.slot_memory import SlotMemory
from quire.services.worker.step.slots import NewBlocks
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32

# While a step is launched, an H200 computes 3,400 tokens of the 0.6B shape and 400 of the 8B shape.
TOKENS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072)
ROWS = (33, 129, 513)  # odd: equal numbers of rows and tokens would be a decode step
NONE: I32 = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, order=True)
class ChunkShape:
    """Numbers of tokens and rows of a recorded graph; smaller steps are padded to them."""

    num_tokens: int
    num_rows: int  # including the padding row; also the number of samples


def chunk_shapes(limits: WorkerLimits, samples_per_row: int) -> list[ChunkShape]:
    """Returns the shapes to record, ascending, as far as steps within `limits` can use them.

    No shape has more tokens than the maximum sequence length, because the padding is one sequence. `samples_per_row`: 1
    plus the drafts of a row.
    """
    most_tokens = min(limits.max_num_batched_tokens, limits.max_model_len)
    most_rows = limits.max_num_seqs * samples_per_row + 1
    smaller = (0, *ROWS[:-1])
    return [
        ChunkShape(tokens, rows)
        for tokens in TOKENS
        for rows, smaller_rows in zip(ROWS, smaller, strict=True)
        if tokens <= most_tokens and smaller_rows < min(tokens + 1, most_rows)
    ]


@dataclass(frozen=True, slots=True)
class ChunkColumns:
    """Inputs of a step with chunks, as views of one array; all int32, on the device."""

    # [num_tokens]
    slots: Tensor
    given: Tensor  # token ids; LAST_SAMPLED: the slot's last sampled token
    positions: Tensor
    slot_mapping: Tensor
    places: Tensor  # indices of block_ids in the flat block tables
    block_ids: Tensor
    # [num_rows]
    row_slots: Tensor
    seq_lens: Tensor
    sampling_tokens: Tensor
    sampling_slots: Tensor
    sample_positions: Tensor
    # [num_rows + 1]
    query_start: Tensor

    @classmethod
    def of(cls, columns: Tensor, shape: ChunkShape) -> ChunkColumns:
        """Returns views of `columns` int32 [NUM_COLUMNS, stride], each cut to the size it has in `shape`."""
        sizes = [shape.num_tokens] * 6 + [shape.num_rows] * 5 + [shape.num_rows + 1]
        return cls(*(column[:size] for column, size in zip(columns, sizes, strict=True)))


NUM_COLUMNS = len(fields(ChunkColumns))
NUM_HALVES = 2  # 32-bit halves of a tree mask, low half first
SEES_ALL = -1  # value of both halves: everything is visible


class ChunkGraphs:
    """Owns the static inputs and the recordings of steps with chunks."""

    one_token_per_row = False  # see StepGraphs

    def __init__(
        self,
        model: RecordedModel,
        memory: SlotMemory,
        shapes: list[ChunkShape],
        *,
        recorder: Recorder,
        staging: Staging,
    ) -> None:
        """Takes at least one shape, ascending; model.choice must have room for the rows of all."""
        self._model, self._memory, self._recorder, self._staging = model, memory, recorder, staging
        self._shapes = shapes
        self._tokens = sorted({shape.num_tokens for shape in shapes})
        self._rows = sorted({shape.num_rows for shape in shapes})
        self._steps: dict[tuple[ChunkShape, bool], RecordedStep] = {}  # keyed by shape and whether a row has an adapter
        # After the named columns: mask halves for draft trees, then slot mappings of the other KV groups.
        self._num_masks = NUM_HALVES if model.has_trees else 0
        self._num_columns = NUM_COLUMNS + self._num_masks + memory.num_groups - 1
        most_words = self._num_columns * max(map(_stride, shapes))
        self._flat = torch.zeros(most_words, dtype=torch.int32, device=memory.last_tokens.device)

    def leave_out_compute_bound(self) -> None:
        """Removes the shapes whose steps compute longer than they launch.

        Finds the smallest such number of tokens by a binary search that runs steps of padding; all ranks must call it
        together.
        """
        self._tokens = self._tokens[: bisect_left(self._tokens, True, key=self._is_compute_bound)]
        self._shapes = [shape for shape in self._shapes if shape.num_tokens in self._tokens]

    def capture(self, most: int = 0) -> None:
        """Records the `most` largest shapes (0: all), largest first, so that smaller ones reuse their memory.

        Records with or without adapters, as the model's step is now.
        """
        for shape in self._shapes[: -most - 1 : -1] if most else reversed(self._shapes):
            self._step(shape)

    def forget_rows(self) -> None:
        """Does nothing: no state of rows is kept."""

    @property
    def keeps_hidden(self) -> bool:
        """Whether steps can end in heads that read hidden states, besides sampling."""
        return self._model.hidden is not None

    @property
    def count(self) -> int:
        return len(self._steps)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a step that is replayed as a graph."""
        return self._tokens[-1] if self._tokens else 0

    def accepts(self, inputs: StepInputs, new_blocks: NewBlocks) -> bool:
        """Returns whether the step has tokens and fits into one of the shapes."""
        return inputs.num_tokens > 0 and self._shape_of(inputs, new_blocks) is not None

    def prepare(self, inputs: StepInputs, new_blocks: NewBlocks) -> ReadyStep:
        """Uploads the inputs of a step that accepts() allows into the columns of the smallest graph with room for them.

        The upload is one copy, ordered after the work launched so far. Surplus tokens, rows, samples and new blocks are
        padding, a prompt of the scratch slot. Until the returned step has been launched, no other may be prepared.
        """
        shape = self._shape_of(inputs, new_blocks)
        assert shape is not None
        step = self._step(shape)
        padding = shape.num_tokens - inputs.num_tokens
        given = inputs.token_ids.copy()
        given[inputs.prev_sampled_tokens] = LAST_SAMPLED
        self._upload(
            step.columns,
            shape,
            tokens=[
                np.repeat(inputs.slots, np.diff(inputs.query_start)),
                given,
                inputs.rotated_positions,
                inputs.slot_mapping[: inputs.num_tokens],
                new_blocks.slots * self._memory.table_width + new_blocks.columns,
                new_blocks.ids,
            ],
            rows=[inputs.slots, np.append(inputs.seq_lens, padding)],
            samples=[inputs.sampling_tokens, inputs.sampling_slots, inputs.sample_positions],
            query_start=inputs.query_start,
            masks=self._halves(inputs),
            mappings=list(inputs.slot_mapping.reshape(-1, inputs.num_tokens)[1:]),
        )
        kept = self._model.hidden
        hidden = None if kept is None else kept.memory[: inputs.num_tokens]
        stage, arriving = self._model.stage, self._model.stage_input(inputs.num_tokens, shape.num_tokens)
        num_rows = inputs.num_tokens if stage is not None and stage.outputs_all_tokens else inputs.num_samples
        return ReadyStep(step, self._model.choice, num_rows, of_rows=False, hidden=hidden, stage_input=arriving)

    def _shape_of(self, inputs: StepInputs, new_blocks: NewBlocks) -> ChunkShape | None:
        """Returns the smallest shape with room for the padding row, all samples and all new blocks; None if none
        has."""
        tokens = _fitting(self._tokens, max(inputs.num_tokens, len(new_blocks.ids)))
        rows = _fitting(self._rows, max(inputs.num_rows + 1, inputs.num_samples))
        return ChunkShape(tokens, rows) if tokens and rows else None

    def _step(self, shape: ChunkShape) -> RecordedStep:
        """Returns the recording of a shape, with or without adapters as the next step is; records it if it is
        missing."""
        key = shape, self._model.is_adapted
        if key not in self._steps:
            self._steps[key] = self._record(shape)
        return self._steps[key]

    def _is_compute_bound(self, num_tokens: int) -> bool:
        """Runs padding of `num_tokens` tokens and returns whether computing it takes longer than launching it."""
        shape = max(shape for shape in self._shapes if shape.num_tokens == num_tokens)
        columns, column = self._fill_with_padding(shape)
        return not self._recorder.is_launch_bound(lambda: self._forward(columns, column, shape))

    def _record(self, shape: ChunkShape) -> RecordedStep:
        """Records the forward pass of `shape` over the static columns, and the sampling if the recording samples."""
        columns, column = self._fill_with_padding(shape)
        choice = self._model.choice
        return RecordedStep.of(
            self._recorder,
            columns,
            lambda: self._forward(columns, column, shape),
            None if choice is None else lambda logits: self._choose(choice, logits, column),
        )

    def _fill_with_padding(self, shape: ChunkShape) -> tuple[Tensor, ChunkColumns]:
        """Fills the static columns with a step of padding; returns them as an array [num_columns, stride] and by
        name."""
        stride = _stride(shape)
        columns = self._flat[: self._num_columns * stride].view(self._num_columns, stride)
        only_padding = [NONE, np.array([shape.num_tokens])]
        self._upload(
            columns,
            shape,
            tokens=[NONE] * 6,
            rows=only_padding,
            samples=[NONE] * 3,
            query_start=np.zeros(1, np.int32),
            masks=[NONE] * self._num_masks,
            mappings=[NONE] * (self._memory.num_groups - 1),
        )
        return columns, ChunkColumns.of(columns[:NUM_COLUMNS], shape)

    def _upload(
        self,
        columns: Tensor,
        shape: ChunkShape,
        *,
        tokens: list[Array],
        rows: list[Array],
        samples: list[Array],
        query_start: Array,
        masks: list[Array],
        mappings: list[Array],
    ) -> None:
        """Copies a step's arrays into the static `columns` and pads each to its size in `shape`.

        `tokens`, `rows`, `samples` and `query_start` are in the order of ChunkColumns; `masks` and `mappings` are the
        additional columns.
        """
        scratch = self._memory.scratch_slot
        behind_tokens: list[Array | int] = [scratch, 0, 0, 0, scratch * self._memory.table_width, 0]
        behind_rows: list[Array | int] = [scratch, 0]
        behind_samples: list[Array | int] = [0, scratch, 0]
        self._staging.upload_into(
            columns,
            [*tokens, *rows, *samples, query_start, *masks, *mappings],
            [
                *[*behind_tokens, *behind_rows, *behind_samples, shape.num_tokens],
                *[SEES_ALL] * len(masks),
                *[0] * len(mappings),
            ],
        )

    def _halves(self, inputs: StepInputs) -> list[Array]:
        """Returns the 32-bit mask halves of each token; empty arrays, which padding makes all visible, in steps without
        trees."""
        if inputs.tree_mask is None:
            return [NONE] * self._num_masks
        assert self._num_masks, "drafts are chains"
        halves = as_words(inputs.tree_mask)
        return [halves[::2], halves[1::2]]

    def _forward(self, columns: Tensor, column: ChunkColumns, shape: ChunkShape) -> Tensor:
        """Runs the forward pass over the static columns and returns logits [num_rows, vocab_size], or a stage's output.

        Writes new block ids to the block tables and, if the model keeps hidden states, those of all tokens to their
        memory.
        """
        token_ids = self._model.edges.begin_step(column, self._memory)
        tables, *others = (tables.index_select(0, column.row_slots) for tables in self._memory.group_tables)
        attention = AttentionMetadata(
            tables,
            column.query_start,
            column.seq_lens,
            max_query_len=shape.num_tokens,
            max_seq_len=self._model.max_seq_len,
            is_recorded=True,
            tree_mask=self._tree_mask(columns, shape.num_tokens),
        )
        batch = ForwardBatch(token_ids, column.positions, column.slot_mapping, attention, column.sampling_tokens)
        batch = batch.with_groups(others, list(columns[NUM_COLUMNS + self._num_masks :, : shape.num_tokens]))
        kept = self._model.hidden
        if kept is None:
            return self._model.forward(batch)
        hidden = kept.forward(replace(batch, logit_tokens=None))
        kept.memory[: shape.num_tokens].copy_(hidden)
        return kept.head(hidden.index_select(0, column.sampling_tokens))

    def _tree_mask(self, columns: Tensor, num_tokens: int) -> Tensor | None:
        """Returns the tree masks of the tokens, int64 [num_tokens], joined from the halves; None without trees."""
        if not self._num_masks:
            return None
        halves = columns[NUM_COLUMNS : NUM_COLUMNS + NUM_HALVES, :num_tokens]
        return halves.t().contiguous().view(torch.int64).squeeze(1)

    def _choose(self, choice: PlainChoice, logits: Tensor, column: ChunkColumns) -> Tensor:
        """Samples a token for each row of `logits` and stores it as the slot's last token."""
        token_ids = choice.choose(logits, column.sample_positions)
        self._model.edges.end_step(column.sampling_slots, self._memory, token_ids)
        return token_ids


def _fitting(sizes: list[int], wanted: int) -> int:
    """Returns the least of the ascending `sizes` that is not below `wanted`; 0 if there is none."""
    at = bisect_left(sizes, wanted)
    return sizes[at] if at < len(sizes) else 0


def _stride(shape: ChunkShape) -> int:
    """Returns the length of a column that has room for all inputs of `shape`, aligned."""
    return aligned(max(shape.num_tokens, shape.num_rows + 1))
