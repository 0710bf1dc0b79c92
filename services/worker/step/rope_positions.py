"""Positions by which queries and keys are rotated in models whose pictures have rows and columns (multimodal rotary
positions, arXiv 2409.12191, 2.1). Numpy only.

A picture of h x w tokens takes max(h, w) positions: its tokens have that of its start on the time axis, and start + row
and start + column on the others. The frames of a video have start + time on the time axis, and it takes as many
positions as its largest one needs. Text has one position on all axes, also that between the frames of a video. After
the last item, a token's position for rotation is its position in the sequence plus a number that stays the same for the
sequence: decode steps need no axes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from quire.services.worker.step.media_items import MediaItem
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument

AXES = 3


def axes_of(items: Iterable[MediaItem]) -> tuple[I32, int]:
    """Returns the positions for rotation, int32 [3, num_tokens] by time, row and column, of all tokens up to the end of
    the last item, and what is added to the position in the sequence after it. Raises InvalidArgument for items that do
    not follow each other, or whose layout does not fit their rows."""
    parts, end, shift = [], 0, 0
    for item in items:
        times, grid = _times_and_grid(item, end)
        first = 0  # frame of the run
        for relative, length in item.row_runs:
            start, count = item.offset + relative, length // (grid[0] * grid[1])
            places = np.indices((count, *grid), dtype=np.int32)
            places[0] = (times[first : first + count] - times[first])[:, None, None]
            parts += [_text(end, start, shift), places.reshape(3, -1) + (start + shift)]
            first += count
            end = start + length
            shift += int(places.max()) + 1 - length
        parts.append(_text(end, item.end, shift))
        end = item.end
    return np.concatenate(parts, axis=1).astype(np.int32, copy=False) if parts else np.zeros((3, 0), np.int32), shift


def _times_and_grid(item: MediaItem, end: int) -> tuple[I32, tuple[int, int]]:
    """Returns the time of each frame of an item, int32 [num_frames], and rows and columns of its tokens. Raises
    InvalidArgument for a layout that does not fit the rows, and an item that begins before `end`."""
    frames, rows, columns, *times = item.layout if len(item.layout) >= AXES else (0, 0, 0)
    wrong_runs = any(length % max(rows * columns, 1) for _, length in item.row_runs)
    wrong_times = len(times) not in ((0, frames) if frames == 1 else (frames,))
    if frames * rows * columns != item.num_embeddings or wrong_runs or wrong_times or item.offset < end:
        raise InvalidArgument(
            f"media: an item of {item.num_embeddings} rows at {item.offset} has the layout {list(item.layout[:8])}; "
            "frames, rows and columns whose product is that number, then the time of each frame of a video, are needed"
            f", at {end} or later",
            field="media",
        )
    return np.array(times or [0], dtype=np.int32), (rows, columns)


def _text(begin: int, end: int, shift: int) -> I32:
    """Returns the positions of text from `begin` to `end` in the sequence, int32 [3, end - begin]."""
    return np.tile(np.arange(begin, end, dtype=np.int32) + np.int32(shift), (AXES, 1))


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
