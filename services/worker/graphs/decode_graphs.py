"""CUDA graphs of decode steps: all kernels of a step in one launch, for selected numbers of rows.

A graph reads its inputs from the same memory at every replay: one array of int32 columns, filled by one copy. Surplus
rows belong to a scratch slot after the last one, have length 0 and store into the null block.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.attention.port import AttentionMetadata, SharedPrefixes
from quire.services.worker.device.staging import Array, Staging, aligned
from quire.services.worker.graphs import shared_prefixes
from quire.services.worker.graphs.cuda_graph import Recorder
from quire.services.worker.graphs.recorded_steps import ReadyStep, RecordedModel, RecordedStep
from quire.services.worker.graphs.row_facts import RowFacts, RowWatch
from quire.services.worker.graphs.shared_prefixes import PrefixTiles
from quire.services.worker.graphs.step_edges import LAST_SAMPLED, DecodeColumns
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.sampling.choice import PlainChoice
from quire.services.worker.step.slot_memory import SlotMemory
from quire.services.worker.step.slots import NewBlocks
from quire.services.worker.step.step_inputs import StepInputs

NAMES = [field.name for field in fields(DecodeColumns)]
NUM_COLUMNS = len(NAMES)
FOLLOWING = slice(
    NAMES.index("positions"), NAMES.index("seq_lens") + 1
)  # columns that a following step increments by one, including slot_mapping


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Returns the numbers of rows to record, ascending up to `max_num_seqs`: 1, then multiples of 8.

    For 2 rows cuBLAS takes at least as long as for 8 (12 us against 5.8 for 1024 x 2048, H200).
    """
    sizes = [1, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_num_seqs + 32, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def shared_sizes(max_num_seqs: int) -> list[int]:
    """Returns the numbers of rows of graphs with shared prefixes, ascending up to `max_num_seqs`.

    They are fewer, because they are additional; at most a third of a graph is padding.
    """
    steps = [size for doubled in range(3, 12) for size in (2**doubled, 3 * 2 ** (doubled - 1))]
    return [*(size for size in steps if size < max_num_seqs), max_num_seqs]


def fitting(sizes: list[int], num_rows: int) -> int:
    """Returns the least of the ascending `sizes` that has room for the rows. Raises IndexError if none has."""
    return sizes[bisect_left(sizes, num_rows)]


class DecodeGraphs:
    """Owns the static inputs and the recordings of decode steps, which end in samples alone."""

    one_token_per_row, keeps_hidden, most_tokens = True, False, 0  # see StepGraphs

    def __init__(
        self,
        model: RecordedModel,
        memory: SlotMemory,
        sizes: list[int],
        *,
        watch: RowWatch,
        recorder: Recorder,
        staging: Staging,
    ) -> None:
        self._model, self._memory, self._recorder, self._staging = model, memory, recorder, staging
        self._watch = watch
        self._sizes = sizes
        self._shared_sizes = shared_sizes(sizes[-1]) if model.rows_per_prefix_tile else []
        # Keyed by number of rows, whether prefixes are shared, and whether a row has an adapter.
        self._graphs: dict[tuple[int, bool, bool], RecordedStep] = {}
        device = memory.last_tokens.device
        self._filled: tuple[RecordedStep, int] | None = None  # and the number of the step in the columns
        # After the named columns: slot mappings of the other KV groups, and rows of encoder outputs attended to.
        self._mappings = slice(NUM_COLUMNS, NUM_COLUMNS + memory.num_groups - 1)
        self._num_columns = self._mappings.stop + (memory.cross_width > 0)
        self._flat = torch.zeros(self._num_columns * aligned(sizes[-1]), dtype=torch.int32, device=device)
        self._prefixes = _PrefixMemory(sizes[-1], model.rows_per_prefix_tile, device)

    def record(self, most: int = 0) -> None:
        """Records the `most` largest graphs of each kind (0: all), largest first, so that smaller ones reuse their
        memory.

        Records with or without adapters, as the model's step is now.
        """
        for sizes, shared in ((self._sizes, False), (self._shared_sizes, True)):
            for size in sizes[: -most - 1 : -1] if most else reversed(sizes):
                self._graph(size, shared=shared)

    def accepts(self, inputs: StepInputs, new_blocks: NewBlocks) -> bool:
        """Returns whether each row has one token and there are no more new blocks than rows."""
        rows = inputs.num_rows
        fits = rows == inputs.num_tokens and 0 < rows <= self._sizes[-1]
        return fits and len(new_blocks.ids) <= self._size(rows)

    @property
    def count(self) -> int:
        return len(self._graphs)

    def forget_rows(self) -> None:
        """Discards cached facts about rows, after slots were released or admitted."""
        self._watch.forget()

    def prepare(self, inputs: StepInputs, new_blocks: NewBlocks) -> ReadyStep:
        """Uploads the inputs of a step that accepts() allows into the columns of the smallest graph with room for its
        rows.

        The upload is one copy, ordered after the work launched so far; a step that follows from the one in the columns
        takes one addition there instead. Until the returned step has been launched, no other may be prepared. Records a
        missing graph (0.1 s on an H200).
        """
        shared_size = fitting(self._shared_sizes, inputs.num_rows) if self._shared_sizes else 0
        facts = self._watch.facts(inputs, shared_size)
        shared = facts.prefixes is not None
        size = shared_size if shared else self._size(inputs.num_rows)
        graph = self._graph(size, shared=shared)
        if self._follows(graph, inputs, new_blocks):
            graph.columns[FOLLOWING, : inputs.num_rows].add_(1)
            if self._mappings.start < self._mappings.stop:
                graph.columns[self._mappings, : inputs.num_rows].add_(1)
        else:
            self._fill(graph.columns, inputs, new_blocks, facts)
        if facts.prefixes is not None:
            self._prefixes.fill(facts.prefixes, shared_size, self._staging)
        self._filled = graph, inputs.number
        arriving = self._model.stage_input(inputs.num_rows, size)
        return ReadyStep(graph, self._model.choice, inputs.num_rows, of_rows=True, stage_input=arriving)

    def _follows(self, graph: RecordedStep, inputs: StepInputs, new_blocks: NewBlocks) -> bool:
        """Returns whether the step has the same rows, one position further, which costs a tenth.

        Block ids still in the columns are written to the same entries once more.
        """
        if self._filled is None or inputs.begins_blocks or len(new_blocks.ids):
            return False
        last_graph, last = self._filled
        return graph is last_graph and inputs.follows == last > 0

    def _size(self, num_rows: int) -> int:
        return fitting(self._sizes, num_rows)

    def _graph(self, size: int, *, shared: bool) -> RecordedStep:
        """Returns the recording of `size` rows, with or without adapters as the next step is; records it if it is
        missing."""
        key = size, shared, self._model.is_adapted
        if key not in self._graphs:
            self._graphs[key] = self._record(size, shared)
        return self._graphs[key]

    def _record(self, size: int, shared: bool) -> RecordedStep:
        """Fills the static columns with padding and records the forward pass over `size` rows, and the sampling if the
        recording samples.

        Discards the step in the columns, so the next one is uploaded.
        """
        self._filled = None
        stride = aligned(size)
        columns = self._flat[: self._num_columns * stride].view(self._num_columns, stride)
        self._staging.upload_into(columns, [np.zeros(0, np.int32)] * self._num_columns, self._padding(0, stride))
        column, mappings = DecodeColumns(*columns[:NUM_COLUMNS, :size]), list(columns[self._mappings, :size])
        num_attended = columns[-1, :size] if self._memory.cross_width else None
        prefixes = self._prefixes.of(size) if shared else None
        choice = self._model.choice
        return RecordedStep.of(
            self._recorder,
            columns,
            lambda: self._forward(column, mappings, prefixes, num_attended),
            None if choice is None else lambda logits: self._choose(choice, logits, column),
        )

    def _forward(
        self,
        column: DecodeColumns,
        mappings: list[Tensor],
        prefixes: SharedPrefixes | None,
        num_attended: Tensor | None,
    ) -> Tensor:
        """Runs the forward pass over the static columns; returns logits [size, vocab_size] or a stage's output.

        Writes the new block ids to the block tables. `mappings`: slot mappings of the other KV groups. `num_attended`:
        rows of the encoder's output that each row attends to; None: models without cross attention.
        """
        token_ids = self._model.edges.begin_step(column, self._memory)
        tables, *others = (tables.index_select(0, column.slots) for tables in self._memory.group_tables)
        attention = AttentionMetadata(
            tables,
            query_start=None,
            seq_lens=column.seq_lens,
            max_query_len=1,
            max_seq_len=self._model.max_seq_len,
            order=column.order,
            prefixes=prefixes,
            cross=None if num_attended is None else self._cross(column.slots, num_attended),
        )
        batch = ForwardBatch(token_ids, column.positions, column.slot_mapping, attention, logit_tokens=None)
        return self._model.forward(batch.with_groups(others, mappings))

    def _cross(self, slots: Tensor, num_attended: Tensor) -> AttentionMetadata:
        """Returns attention metadata of the rows over the output of their encoder."""
        return AttentionMetadata(
            self._memory.cross_tables.index_select(0, slots),
            query_start=None,
            seq_lens=num_attended,
            max_query_len=1,
            max_seq_len=self._model.cross_length,
        )

    def _choose(self, choice: PlainChoice, logits: Tensor, column: DecodeColumns) -> Tensor:
        """Samples a token for each row of `logits` and stores it as the slot's last token."""
        token_ids = choice.choose(logits, column.seq_lens)
        self._model.edges.end_step(column.slots, self._memory, token_ids)
        return token_ids

    def _fill(self, columns: Tensor, inputs: StepInputs, new_blocks: NewBlocks, facts: RowFacts) -> None:
        """Uploads the step's inputs into the static `columns` in one copy; surplus rows are padding."""
        given = np.full(inputs.num_rows, LAST_SAMPLED, dtype=np.int32)
        if len(inputs.prev_sampled_tokens) < inputs.num_rows:
            given[:] = inputs.token_ids
            given[inputs.prev_sampled_tokens] = LAST_SAMPLED
        arrays: list[Array] = [
            inputs.slots,
            given,
            inputs.rotated_positions,
            inputs.slot_mapping[: inputs.num_rows],
            inputs.seq_lens,
            facts.order,
            new_blocks.slots * self._memory.table_width + new_blocks.columns,
            new_blocks.ids,
            *inputs.slot_mapping.reshape(-1, inputs.num_rows)[1:],
            *(() if inputs.num_attended is None else (inputs.num_attended,)),
        ]
        self._staging.upload_into(columns, arrays, self._padding(inputs.num_rows, columns.size(1)))

    def _padding(self, num_rows: int, stride: int) -> list[Array | int]:
        """Returns the padding value of each column for rows from `num_rows` to `stride`; surplus rows come last in the
        order."""
        scratch = self._memory.scratch_slot
        place = scratch * self._memory.table_width
        return [scratch, 0, 0, 0, 0, np.arange(num_rows, stride), place, 0, *[0] * (self._num_columns - NUM_COLUMNS)]


class _PrefixMemory:
    """Static memory from which graphs read shared prefixes; filled when they change."""

    def __init__(self, most_rows: int, rows_per_tile: int, device: torch.device) -> None:
        self._rows_per_tile = rows_per_tile
        tiles = shared_prefixes.num_tiles(most_rows, rows_per_tile) if rows_per_tile else 0
        self._flat = torch.zeros((rows_per_tile + 2) * tiles + most_rows, dtype=torch.int32, device=device)
        self._held: tuple[PrefixTiles, int] | None = None  # and its number of rows

    def of(self, num_rows: int) -> SharedPrefixes:
        """Returns the views of the static memory from which a graph of `num_rows` rows reads its prefixes."""
        per_tile = self._rows_per_tile
        tiles = shared_prefixes.num_tiles(num_rows, per_tile)
        parts = self._flat[: (per_tile + 2) * tiles + num_rows].split((per_tile * tiles, tiles, tiles, num_rows))
        return SharedPrefixes(parts[0].view(tiles, per_tile), *parts[1:])

    def fill(self, tiles: PrefixTiles, num_rows: int, staging: Staging) -> None:
        """Uploads `tiles` for a graph of `num_rows` rows, unless the same object is there already."""
        if self._held is not None and self._held[0] is tiles and self._held[1] == num_rows:
            return
        self._held = tiles, num_rows
        words = np.concatenate([tiles.members.ravel(), tiles.tables, tiles.lens, tiles.starts])
        staging.upload_into(self._flat[: len(words)].view(1, -1), [words], [0])
