"""Host record of what steps write into the KV blocks: tokens and parent blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.services.worker.kv.block_contents import NO_MEDIA_PARTS, NO_PARENT, BlockContents
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.replica.flight import NO_STEP_CHANGES, StepChanges
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.runner.output import RunnerOutput
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.media_items import MediaItem
from quire.services.worker.step.slots import NewBlocks, Rows, SlotTable
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32
from quire.shared.kv.block_hash import media_of


class BlockRecord:
    """Owns the record of the blocks' contents and each slot's last sampled token on the host."""

    def __init__(self, limits: WorkerLimits, table: SlotTable) -> None:
        self.table = table
        self._block_size, self._num_groups = limits.block_size, limits.num_groups
        self._windows = [group for group, _ in limits.layout.windows]  # KV groups that have one
        self.contents = BlockContents(limits.num_blocks, limits.block_size, windows=bool(self._windows))
        self._roots: dict[int, bytes] = {}  # by slot: parent hash of the sequence's first block
        self._media: dict[int, Sequence[MediaItem]] = {}  # by slot: media items of sequences that have some
        self._last_tokens = np.zeros(limits.max_num_seqs, dtype=np.int32)

    def admit(self, slot: int, root_hash: bytes, media: Sequence[MediaItem] = ()) -> None:
        self._roots[slot] = root_hash
        if media:
            self._media[slot] = media

    def release(self, slot: int) -> None:
        self._roots.pop(slot, None)
        self._media.pop(slot, None)

    def record_allocations(self, new: NewBlocks, copies: BlockCopies | None) -> None:
        """Records the blocks that are newly allocated with their parents and groups: all except cached blocks of an
        admission that this step does not fill by a copy."""
        table, several = self.table, self.table.num_groups > 1
        if table.cross_width:
            new = self._without_encoder_outputs(new)
        cached = -(-table.num_cached_tokens[new.slots] // self._block_size)
        positions = new.columns % table.width if several else new.columns
        starts = positions >= cached
        if copies is not None:
            starts |= np.isin(new.ids, copies.targets)
        fresh = starts.nonzero()[0]
        slots, positions, ids = new.slots[fresh], positions[fresh], new.ids[fresh]
        before = table.block_table[slots, np.maximum(new.columns[fresh] - 1, 0)]
        parents = np.where(positions > 0, before, NO_PARENT)
        firsts = (positions == 0).nonzero()[0].tolist()
        roots = {int(ids[i]): self._roots[int(slots[i])] for i in firsts}
        groups = new.columns[fresh] // table.width if several else 0
        if copies is not None and self._windows:  # the window may have released their parents
            parents[np.isin(ids, copies.targets) & np.isin(groups, self._windows)] = NO_PARENT
        media = self._media_parts(slots, positions, ids) if self._media else NO_MEDIA_PARTS
        self.contents.allocate(ids, parents, roots, groups, media=media)

    def _without_encoder_outputs(self, new: NewBlocks) -> NewBlocks:
        """Returns the blocks of a step that hold tokens of sequences. The content of the others, which hold the output
        of an encoder, is not reported."""
        attended = new.columns >= self.table.cross_column
        if attended.any():
            self.contents.invalidate(new.ids[attended])
        return NewBlocks(new.slots[~attended], new.columns[~attended], new.ids[~attended])

    def _media_parts(self, slots: Rows, positions: Rows, ids: I32) -> dict[int, bytes]:
        """Returns the media parts of the blocks' hashes, by block id; `positions`: indices of the blocks in their
        sequences."""
        size, parts = self._block_size, {}
        for slot, position, block in zip(slots.tolist(), positions.tolist(), ids.tolist(), strict=True):
            part = media_of(self._media.get(slot, ()), position * size, (position + 1) * size)
            if part:
                parts[block] = part
        return parts

    def record(self, inputs: StepInputs, changes: StepChanges, output: RunnerOutput) -> None:
        """Records the tokens of an executed step at their places in the KV memory and the last token of each sampled
        slot. Applies block copies and beam moves first; rejected draft tokens are not recorded, accepted ones of a tree
        at their moved places."""
        if changes is not NO_STEP_CHANGES:
            changes.apply_to_host(self.contents, self._last_tokens)
        token_ids = inputs.token_ids if inputs.hashed_token_ids is None else inputs.hashed_token_ids
        token_ids = token_ids.copy()  # the device may still be reading the original
        token_ids[inputs.prev_sampled_tokens] = self._last_tokens[inputs.prev_sampled_slots]
        places = inputs.slot_mapping
        if output.token_moves is not None:
            sources, targets = output.token_moves.of_tokens(inputs.sampling_tokens)
            token_ids[targets] = token_ids[sources]
        if self._num_groups > 1:
            token_ids = np.tile(token_ids, self._num_groups)
        if output.rejected_tokens is not None:
            right = np.ones(inputs.num_tokens, dtype=np.bool_)
            right[inputs.sampling_tokens[output.rejected_tokens]] = False  # a rejected draft also rejects its row's KV
            right = np.tile(right, self._num_groups)
            places, token_ids = places[right], token_ids[right]
        self.contents.record_tokens(places, token_ids)
        self._last_tokens[inputs.sampled_slots] = output.last_tokens

    def report(self) -> RetainedState:
        """Returns the blocks of known content with their hashes, which are computed now."""
        known = self.contents.report()
        return RetainedState(known.block_ids, known.hashes, known.groups)

    def count_blocks(self) -> tuple[int, int]:
        """Returns the number of blocks owned by live slots, and of other blocks with known content."""
        owned = self.table.owned_blocks()
        cached = self.contents.full_blocks() & ~owned
        return int(np.count_nonzero(owned)), int(np.count_nonzero(cached))
