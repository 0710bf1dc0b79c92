"""Running sequences and their KV blocks, changed together.

A slot gets blocks through add_capacity() alone, which grows its capacity and adds the blocks to the plan. Block hashes
are recorded when a step that fills the block is planned, so that the next sequence can share the block.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import I32, Admission
from quire.services.scheduler.core.running.running import Running, Slots
from quire.services.scheduler.core.sequences.media import MediaItem, first_start
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.sequences.tokens import TOKEN_BYTES
from quire.services.scheduler.core.step.plan_builder import PlanBuilder
from quire.services.scheduler.kv_cache.block_pool import Observer
from quire.services.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from quire.services.scheduler.kv_cache.part_index import PARENT_BYTES
from quire.shared.kv import block_hash


class SlotTables:
    """Owns the columns by slot and the block tables."""

    def __init__(self, limits: CoreLimits, observer: Observer | None) -> None:
        self.limits = limits
        self.kv = KVCacheManager(
            limits.num_blocks,
            limits.groups,
            limits.max_num_seqs,
            limits.caches_prefixes,
            observer=observer,
            prefix_grain=limits.prefix_grain,
        )
        self.groups = self.kv.groups
        self._has_windows = self.groups.has_windows
        self.running = Running(limits.max_num_seqs, self.groups, limits.num_micro_batches)
        self._num_ordered: I32 = np.zeros(
            limits.max_num_seqs, dtype=np.int32
        )  # [num_slots] token positions that planned steps compute

    # Slots and blocks.

    def admit(
        self, builder: PlanBuilder, sequence: Sequence, shared: list[int], num_cached: int, num_computed: int
    ) -> int:
        """Takes a slot for `sequence`, starting with `shared` blocks; the hashes of the blocks that `num_cached` tokens
        fill are recorded already. `num_computed`: tokens that need not be computed. Returns the slot."""
        token_ids = bytes(sequence.tokens)
        slot = self.running.admit(sequence, num_computed, builder.micro_batch)
        self.kv.admit(slot, shared, num_cached // self.limits.block_size)
        if self._has_windows:
            self.kv.set_restart_points(slot, sequence.restart_points)
        builder.admit(self._admission(slot, sequence, token_ids, num_cached))
        self.add_capacity(builder, slot, shared)
        return slot

    def _admission(self, slot: int, sequence: Sequence, token_ids: bytes, num_cached: int) -> Admission:
        """Returns the admission for the plan; gives the slot the blocks of the encoder's output that the sequence
        attends to."""
        cross = self.kv.cross
        if cross is None:
            return Admission(slot, sequence, token_ids, num_cached)
        item = sequence.media[0]
        is_new = cross.admit(slot, item.identifier, item.num_embeddings)
        return Admission(slot, sequence, token_ids, num_cached, cross.table(slot), is_new)

    def release(self, sequence: Sequence, fence: int | None) -> int:
        """Releases slot and blocks; the blocks are free once the step `fence` has returned. Returns the slot."""
        slot = sequence.slot
        self.running.release(slot)
        self.kv.release(slot, fence)
        return slot

    def rebase(self, builder: PlanBuilder, slot: int, parent: int, shared: list[int]) -> None:
        """Continues the beam in `parent` in `slot`: releases the slot's blocks and shares those of the parent. The plan
        states this by a BeamMove."""
        self.kv.rebase(slot, shared)
        self.running.fork(parent, slot)
        self.running.capacity[slot] = 0
        self.add_capacity(builder, slot, shared, in_plan=False)

    def add_capacity(self, builder: PlanBuilder, slot: int, blocks: list[int], *, in_plan: bool = True) -> None:
        """Counts blocks of the slot's table as capacity. `in_plan`: the plan names them as new."""
        if not blocks:
            return
        self.running.capacity[slot] += len(blocks) // self.kv.num_groups * self.limits.block_size
        if in_plan:
            builder.add_blocks(slot, blocks)

    def grow(self, builder: PlanBuilder, slot: int, num_tokens: int) -> list[int]:
        """Allocates blocks so that `slot` has room for `num_tokens`; the caller has checked that there are enough.
        Returns the new blocks."""
        blocks = self.kv.grow(slot, num_tokens)
        assert blocks is not None, "there is room"
        self.add_capacity(builder, slot, blocks)
        return blocks

    def append_blocks(self, builder: PlanBuilder, slot: int, count: int = 1, *, in_plan: bool = True) -> list[int]:
        """Allocates `count` block positions for `slot`; the caller has checked that there are enough."""
        blocks = self.kv.allocate(slot, count)
        self.add_capacity(builder, slot, blocks, in_plan=in_plan)
        return blocks

    def append_each(self, builder: PlanBuilder, slots: Slots) -> None:
        """Allocates one block position for each of `slots`; the caller has checked that there are enough."""
        listed = slots.tolist()
        self.running.capacity[slots] += self.limits.block_size
        builder.add_blocks_each(listed, self.kv.append_each(listed))

    def slide(self) -> None:
        """Frees blocks that slid out of every window: no step planned from now on reads them. Does nothing for
        models without sliding windows."""
        if self._has_windows:
            running = self.running
            certain = np.minimum(running.confirmed(running.num_computed), running.capacity)
            self.kv.slide(certain, running.live)

    # Tokens.

    def schedule_tokens(self, builder: PlanBuilder, slot: int, num_tokens: int) -> None:
        """Schedules the next `num_tokens` of `slot`, whose blocks are allocated, and advances its columns. If they
        complete the known tokens, the slot samples one more, with drafts if the budget suffices; a slot that samples
        nothing is marked as ending. A slot that decodes its one missing token is implied by the plan; all others are
        named with their token counts."""
        running = self.running
        total, num_computed = int(running.num_tokens[slot]), int(running.num_computed[slot])
        non_sampling = slot in running.non_sampling
        is_named = (
            non_sampling or bool(running.is_beam[slot]) or slot % running.num_micro_batches != builder.micro_batch
        )
        implied = num_computed == total - 1 and not is_named
        computed = running.num_computed[slot] = num_computed + num_tokens
        is_complete = computed == total
        if is_complete and not non_sampling:
            running.num_tokens[slot] = total + 1
        if is_complete or (computed == total - 1 and not is_named):
            running.prefilling.discard(slot)
        drafts = implied and builder.num_drafts > 0
        if drafts and not builder.budget.try_take(builder.num_drafts):
            implied = drafts = False  # a named slot does not draft
        if drafts:
            running.assume_accepted(slot, builder.num_drafts)
        builder.add_chunk(slot, num_tokens, implied=implied, samples=is_complete and not non_sampling, drafts=drafts)
        if is_complete and non_sampling:
            builder.mark_ending(slot)

    def append_tokens(self, slots: Slots, tokens: I32) -> None:
        """Appends the next token of each of `slots`."""
        for sequence, block in self.running.append(slots, tokens):
            self._extend_chain(sequence, block)

    def append_late_token(self, sequence: Sequence, token: int) -> None:
        """Appends the next token of a sequence that has lost its slot meanwhile, and the hash of the block that the
        token completes."""
        sequence.tokens.append(token)
        num_tokens, size = sequence.num_tokens, self.limits.block_size
        if num_tokens % size == 0:
            self._extend_chain(sequence, sequence.tokens.column(num_tokens - size, num_tokens))

    def _extend_chain(self, sequence: Sequence, block: bytes) -> None:
        """Appends the hash of the sequence's next full block, whose tokens are `block` (i32 column); nothing where
        prefixes are not cached."""
        if not self.limits.caches_prefixes:
            return
        hashes, size = sequence.block_hashes, self.limits.block_size
        begin = len(hashes) * size
        media = block_hash.media_of(sequence.media, begin, begin + size) if sequence.media else b""
        hashes.append(block_hash.block_hash(hashes[-1] if hashes else sequence.root_hash, block, media))

    # Recorded hashes.

    def cache_full_blocks(self) -> None:
        """Records the hashes of the blocks that planned steps fill with known tokens, so that other sequences can
        share them; drafts that may be rejected do not count."""
        if not self.kv.enable_caching:
            return
        running = self.running
        certain = running.confirmed(running.num_computed)  # drafts may be rejected, or have no room
        certain = self._num_ordered = np.minimum(certain, running.capacity)
        filled = np.minimum(running.num_known, certain) // running.block_size
        named = self.kv.num_hashed
        slots = (running.live & (filled > named)).nonzero()[0]
        for slot, first, num_filled in zip(slots.tolist(), named[slots].tolist(), filled[slots].tolist(), strict=True):
            self._cache_between(slot, first, num_filled)

    def cache_blocks(self, slot: int, num_filled: int) -> None:
        """Records the hashes of the first `num_filled` blocks of `slot`."""
        self._cache_between(slot, int(self.kv.num_hashed[slot]), num_filled)

    def _cache_between(self, slot: int, first: int, num_filled: int) -> None:
        """Records the hashes of blocks [first, num_filled); those before are recorded."""
        self.kv.record_hashes(slot, self.running.sequence(slot).block_hashes[first:num_filled], first)
        if self.kv.parts is not None:
            self.kv.record_full_blocks(slot, [self._content(slot, i) for i in range(first, num_filled)])

    def cache_prompts(self, slots: list[int]) -> None:
        """Records the partial blocks at the end of prompts that a planned step completes: another sequence may have the
        same prompt."""
        if self.kv.parts is not None:
            for slot in slots:
                if not self.running.is_beam[slot]:
                    self.cache_partial_block(slot)

    def cache_partial_block(self, slot: int) -> None:
        """Records the tokens of `slot` after its last full block in the part index, as far as planned steps compute
        them and at least prefix_grain of them; records full blocks that are not recorded yet as well."""
        if self.kv.parts is None:
            return
        num_held = min(int(self.running.num_known[slot]), int(self._num_ordered[slot]))
        num_filled, rest = divmod(num_held, self.limits.block_size)
        if num_filled > self.kv.num_hashed[slot]:
            self.cache_blocks(slot, num_filled)
        assert num_filled == self.kv.num_hashed[slot], "what is on record stays"
        if rest >= self.limits.prefix_grain:
            known = self._content(slot, num_filled)
            self.kv.record_part(slot, known[: PARENT_BYTES + rest * TOKEN_BYTES])

    def _content(self, slot: int, block: int) -> bytes:
        """Returns the known content of a block of `slot`, as the part index takes it."""
        sequence, size = self.running.sequence(slot), self.limits.block_size
        begin, tokens = block * size, sequence.tokens.column(block * size, (block + 1) * size)
        if sequence.media:
            tokens = _without_items(sequence.media, begin, tokens)
        return sequence.hash_before(block) + tokens


def _without_items(items: Iterable[MediaItem], begin: int, tokens: bytes) -> bytes:
    """Returns a block's tokens (i32 column) from position `begin` on, with ones that no prompt has from the first item
    on that starts in the block: other pictures have the same tokens. An item that started before is part of the hash
    before the block."""
    num_kept = (first_start(items, begin, begin + len(tokens) // TOKEN_BYTES) - begin) * TOKEN_BYTES
    return tokens[:num_kept] + b"\xff" * (len(tokens) - num_kept)
