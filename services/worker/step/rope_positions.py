"""Positions by which queries and keys are rotated in models whose pictures have rows and columns (multimodal rotary
positions, arXiv 2409.12191, 2.1). Numpy only.

A picture of h x w tokens takes max(h, w) positions: its tokens have that of its start on the time axis, and start + row
and start + column on the others. Text has one position on all axes. After the last picture, a token's position for
rotation is its position in the sequence plus a number that stays the same for the sequence: decode steps need no axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from quire.services.worker.step.media_items import MediaItem
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument


def axes_of(items: Iterable[MediaItem]) -> tuple[I32, int]:
    """Returns the positions for rotation, int32 [3, num_tokens] by time, row and column, of all tokens up to the end of
    the last item, and what is added to the position in the sequence after it. Raises InvalidArgument for items that do
    not follow each other, or whose layout does not fit their length."""
    parts, end, shift = [], 0, 0
    for item in items:
        grid = item.layout
        if len(grid) != 3 or np.prod(grid) != item.length or item.offset < end:
            text = (
                f"media: an item of {item.length} tokens at {item.offset} has the layout {list(grid)}; frames, rows "
                f"and columns whose product is its length are needed, at {end} or later"
            )
            raise InvalidArgument(text, field="media")
        text_positions = np.arange(end, item.offset, dtype=np.int32) + shift
        start = item.offset + shift
        parts += [np.tile(text_positions, (3, 1)), np.indices(grid, dtype=np.int32).reshape(3, -1) + start]
        end = item.offset + item.length
        shift = start + max(grid[1:]) - end
    return np.concatenate(parts, axis=1).astype(np.int32, copy=False) if parts else np.zeros((3, 0), np.int32), shift


class PlainPositions:
    """Null object of models that rotate by the position in the sequence."""

    def admit(self, slot: int, items: Iterable[MediaItem]) -> None:
        """Does nothing: pictures shift no positions."""

    def release(self, slot: int) -> None:
        """Does nothing: no slot has positions of its own."""

    def in_step(self, inputs: StepInputs) -> StepInputs:
        """Returns the step unchanged."""
        return inputs


class RopePositions(PlainPositions):
    """Owns the positions for rotation of the slots whose sequences have pictures."""

    def __init__(self, num_slots: int) -> None:
        self._axes: dict[int, I32] = {}  # by slot: [3, num_tokens], up to the end of the last picture
        self._ends = np.zeros(num_slots, dtype=np.int32)  # [num_slots] token after the last picture; 0: none
        self._shifts = np.zeros(num_slots, dtype=np.int32)  # [num_slots] added to positions from there on

    def admit(self, slot: int, items: Iterable[MediaItem]) -> None:
        """Computes and stores the positions of a sequence with the pictures `items`. Raises InvalidArgument as
        axes_of()."""
        axes, shift = axes_of(items)
        if axes.size:
            self._axes[slot] = axes
            self._ends[slot], self._shifts[slot] = axes.shape[1], shift

    def release(self, slot: int) -> None:
        """Drops the positions of a slot."""
        if self._axes.pop(slot, None) is not None:
            self._ends[slot] = self._shifts[slot] = 0

    def in_step(self, inputs: StepInputs) -> StepInputs:
        """Returns the step with its positions for rotation; a step of slots without pictures is returned as it is."""
        if not self._axes or not self._ends[inputs.slots].any():
            return inputs
        slots = inputs.slots
        if inputs.num_tokens != inputs.num_rows:
            slots = np.repeat(slots, np.diff(inputs.query_start))
        positions = inputs.positions + self._shifts[slots]
        early = inputs.positions < self._ends[slots]
        if not early.any():
            return replace(inputs, rope_positions=positions)
        axes = np.tile(positions, (3, 1))
        for slot in np.unique(slots[early]).tolist():
            tokens = np.flatnonzero(early & (slots == slot))
            axes[:, tokens] = self._axes[slot][:, inputs.positions[tokens]]
        differ = bool((axes[1:] != axes[0]).any())
        return replace(inputs, rope_positions=axes[0], rope_axes=axes if differ else None)
