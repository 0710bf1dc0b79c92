"""Facts about the rows of a decode step that hold while the rows stay the same, computed once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.services.worker.graphs.shared_prefixes import LEAST_SAVED, PrefixTiles, cut, find_groups
from quire.services.worker.step.slots import Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Order and shared prefixes of rows that grow by one position a step."""

    order: I32  # [num_rows] rows, longest first
    prefixes: PrefixTiles | None


class RowWatch:
    """Cache of RowFacts that recomputes them when other rows decode or a slot passes to another sequence."""

    def __init__(
        self,
        block_table: npt.NDArray[np.int32],
        block_size: int,
        rows_per_prefix_tile: int,
        *,
        num_kept: int = 1,
        least_saved: int = LEAST_SAVED,
    ) -> None:
        """Creates an empty cache over the host's `block_table`.

        `rows_per_prefix_tile`: rows of a shared-prefix tile; 0: prefixes are not shared. `num_kept`: number of
        micro-batches whose facts are kept, because they alternate. `least_saved`: positions from which a prefix is
        shared.
        """
        self._block_table = block_table
        self._block_size = block_size
        self._rows_per_tile = rows_per_prefix_tile
        self._least_saved = least_saved
        self._kept: deque[tuple[Rows, RowFacts]] = deque(maxlen=num_kept)

    def forget(self) -> None:
        """Discards the facts, after slots were released or admitted."""
        self._kept.clear()

    def facts(self, inputs: StepInputs, graph_rows: int) -> RowFacts:
        """Returns the order and the shared prefixes of a decode step, with prefixes for a graph of `graph_rows` rows.

        Steps of the same slots get the same object, computed at the first of them.
        """
        for slots, facts in self._kept:
            if inputs.slots is slots or np.array_equal(inputs.slots, slots):
                return facts
        order = np.argsort(-inputs.seq_lens, kind="stable").astype(np.int32)
        facts = RowFacts(order, self._shared(inputs, graph_rows))
        self._kept.append((inputs.slots, facts))
        return facts

    def _shared(self, inputs: StepInputs, graph_rows: int) -> PrefixTiles | None:
        """Returns the shared prefixes of the rows as tiles; None if sharing is off or saves too little."""
        if not self._rows_per_tile:
            return None
        groups = find_groups(
            self._block_table, inputs.slots, inputs.seq_lens, self._block_size, least_saved=self._least_saved
        )
        return cut(groups, graph_rows, self._rows_per_tile, self._block_size) if groups else None
