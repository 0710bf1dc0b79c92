"""What holds for the rows of a decode step as long as they stay the same: found once, not every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.graphs.shared_prefixes import PrefixTiles, cut, find_groups
from services.worker.step.slots import Rows
from services.worker.step.step_inputs import StepInputs
from shared.columns import I32


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Rows all grow by one position a step: neither order nor shared beginnings change."""

    order: I32  # [num_rows] rows, longest first
    prefixes: PrefixTiles | None


class RowWatch:
    """Finds the facts anew when other rows decode, or when a slot has passed to another sequence."""

    def __init__(self, block_table: npt.NDArray[np.int32], block_size: int, rows_per_prefix_tile: int) -> None:
        """`rows_per_prefix_tile`: 0 where prefixes are not shared."""
        self._block_table = block_table
        self._block_size = block_size
        self._rows_per_tile = rows_per_prefix_tile
        self._slots: Rows = np.zeros(0, np.intp)
        self._facts: RowFacts | None = None

    def forget(self) -> None:
        """Slots have been released or admitted."""
        self._facts = None

    def facts(self, inputs: StepInputs, graph_rows: int) -> RowFacts:
        """Of a decode step; prefixes for a graph of `graph_rows` rows."""
        unchanged = inputs.slots is self._slots or np.array_equal(inputs.slots, self._slots)
        if self._facts is None or not unchanged:
            self._slots = inputs.slots
            order = np.argsort(-inputs.seq_lens, kind="stable").astype(np.int32)
            self._facts = RowFacts(order, self._shared(inputs, graph_rows))
        return self._facts

    def _shared(self, inputs: StepInputs, graph_rows: int) -> PrefixTiles | None:
        if not self._rows_per_tile:
            return None
        groups = find_groups(self._block_table, inputs.slots, inputs.seq_lens, self._block_size)
        return cut(groups, graph_rows, self._rows_per_tile, self._block_size) if groups else None
