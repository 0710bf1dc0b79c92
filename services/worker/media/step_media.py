"""Rows of media items in the prompt chunks of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from quire.services.worker.device.staging import upload
from quire.services.worker.layers.forward_batch import MediaRows
from quire.services.worker.step.media_items import MediaItem, last_row_end
from quire.services.worker.step.plan_violation import PlanViolation, require
from quire.shared.columns import I32, U32

if TYPE_CHECKING:
    import torch

    from quire.services.worker.media.encoder_cache import EncoderCache
    from quire.services.worker.step.slots import Rows
    from quire.services.worker.step.step_inputs import StepInputs


class SlotMedia(Protocol):
    """Media items of the slots."""

    def admit(self, slot: int, items: Sequence[MediaItem], num_computed: int) -> None:
        """Adds the items of an admitted sequence, of which `num_computed` tokens are computed. Raises PlanViolation for
        items whose rows are needed and not kept."""

    def release(self, slot: int) -> None: ...

    def write(self, item: MediaItem, block_ids: U32) -> None:
        """Writes what decoders attend to of an item into blocks, before the next launch. Raises PlanViolation if its
        rows are not kept, and for models without cross attention."""


class NoStepMedia:
    """Null object of models without an encoder."""

    pending: Mapping[int, object] = MappingProxyType({})

    def admit(self, slot: int, items: Sequence[MediaItem], num_computed: int) -> None:
        """Raises PlanViolation: the worker has announced no encoder."""
        raise PlanViolation(f"admitted slot {slot} has media, and this worker has announced no encoder")

    def release(self, slot: int) -> None:
        """Does nothing: no slot has media."""

    def write(self, item: MediaItem, block_ids: U32) -> None:
        """Raises PlanViolation: the model has no cross attention."""
        raise PlanViolation("writes_cross: this worker has announced no cross attention")

    def rows(self, inputs: StepInputs) -> MediaRows | None:
        """Returns None: no step has rows of media."""
        return None


NO_STEP_MEDIA = NoStepMedia()


class _StepRows(NamedTuple):
    """Tokens of a step that take rows of media, and those rows, as they are collected slot by slot."""

    tokens: list[Rows]  # indices in the step
    parts: list[torch.Tensor]  # their rows
    seen_ends: I32  # [num_tokens] position after the run of rows that a token is in; 0: none


class StepMedia(NoStepMedia):
    """Finds the rows that take the place of token embeddings in a step. A slot is watched until its last row is
    computed, so that decode steps cost nothing."""

    def __init__(self, cache: EncoderCache, device: torch.device, *, sees_ahead: bool = False) -> None:
        """`sees_ahead`: tokens with rows see each other within their run (AttentionMetadata.seen_ends); no chunk ends
        inside of one."""
        self._cache, self._device, self._sees_ahead = cache, device, sees_ahead
        # By slot, until its last row is computed: items, end of their last row.
        self.pending: dict[int, tuple[Sequence[MediaItem], int]] = {}

    def admit(self, slot: int, items: Sequence[MediaItem], num_computed: int) -> None:
        """Adds the items of an admitted sequence, of which `num_computed` tokens are computed. Raises PlanViolation for
        items whose rows are needed and not kept."""
        for item in items:
            kept = item.identifier in self._cache or last_row_end([item]) <= num_computed
            require(kept, lambda: f"admitted slot {slot}: the rows of a media item are not kept")
        end = last_row_end(items)
        if end > num_computed:
            self.pending[slot] = items, end

    def release(self, slot: int) -> None:
        """Drops the items of a slot."""
        self.pending.pop(slot, None)

    def rows(self, inputs: StepInputs) -> MediaRows | None:
        """Returns the rows of media in a step; None if it has none."""
        found = _StepRows([], [], np.zeros(inputs.num_tokens, np.int32))
        for slot in [*self.pending]:
            row = int(np.searchsorted(inputs.slots, slot))
            if row < inputs.num_rows and inputs.slots[row] == slot:
                self._add_rows(slot, inputs, row, found)
        if not found.tokens:
            return None
        import torch

        rows = found.parts[0] if len(found.parts) == 1 else torch.cat(found.parts)
        ends = upload(found.seen_ends, self._device) if self._sees_ahead else None
        return MediaRows(upload(np.concatenate(found.tokens), self._device), rows, ends)

    def _add_rows(self, slot: int, inputs: StepInputs, row: int, found: _StepRows) -> None:
        """Adds to `found` the tokens of the step's row `row` that take rows of media, and those rows. Drops the slot
        once its last row of media is computed."""
        items, last = self.pending[slot]
        first, end = int(inputs.query_start[row]), int(inputs.seq_lens[row])
        begin = end - (int(inputs.query_start[row + 1]) - first)
        for item in items:
            for position, first_row, count in item.rows_in(begin, end):
                at = first + position - begin
                found.tokens.append(np.arange(at, at + count))
                found.parts.append(self._cache.rows(item.identifier)[first_row : first_row + count])
                found.seen_ends[at : at + count] = position + count
        if end >= last:
            del self.pending[slot]
