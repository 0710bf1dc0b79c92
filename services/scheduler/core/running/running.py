"""Running sequences as columns, one row per slot, so that a step costs a few vector operations whatever the batch size.

Rows of free slots hold values that no vector operation selects (`live` is False).
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.plan import I32
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.sequences.tokens import TOKEN_BYTES, SequenceTokens
from quire.services.scheduler.kv_cache.groups import KVGroups

Slots = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
NO_TOKEN = -1
MAX_LOOPED_STOPS = 4  # up to this many stop tokens per sequence, comparing column by column is faster than as a matrix


class Running:
    """Columns of the running sequences. `num_tokens` and `num_computed` are as planned: they count the steps in flight
    as done and their drafts as accepted; `num_drafts_in_flight` of those tokens may turn out rejected."""

    def __init__(self, num_slots: int, groups: KVGroups, num_micro_batches: int = 1) -> None:
        self.num_slots = num_slots
        self.block_size = block_size = groups.block_size
        self._groups, self._plain = groups, groups.plain
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.max_blocks = 0  # upper bound of the blocks that all sequences need, without sharing
        self.prefilling: set[int] = set()  # slots with more than one token to compute, or that must be named to compute
        self.non_sampling: set[int] = set()  # slots of sequences that sample nothing (pooling)
        self.live = np.zeros(num_slots, dtype=bool)
        self.keys = np.full(num_slots, -1, dtype=np.int64)
        self.order = np.full(num_slots, -1, dtype=np.int64)
        self.owners = np.zeros(num_slots, dtype=np.int32)
        self.sequence_ids = np.zeros(num_slots, dtype=np.uint32)
        self.num_tokens = np.zeros(num_slots, dtype=np.int32)
        self.num_computed = np.zeros(num_slots, dtype=np.int32)
        self.num_drafts_in_flight = np.zeros(num_slots, dtype=np.int32)  # planned drafts without a result
        self._has_drafted = False  # whether any step had drafts; until then nothing has to be subtracted
        self.tenants = np.zeros(num_slots, dtype=np.int32)
        self.urgency = np.zeros(num_slots, dtype=np.float64)  # smaller is more urgent
        self.num_prompt_tokens = np.zeros(num_slots, dtype=np.int32)
        self._token_rows = TokenRows(num_slots, block_size)
        self.num_known = self._token_rows.num_known  # tokens whose value is known
        self.num_known_at_admission = np.zeros(num_slots, dtype=np.int32)  # num_known at admission
        self.limit = np.zeros(num_slots, dtype=np.int32)  # number of tokens at which the sequence ends
        self.capacity = np.zeros(num_slots, dtype=np.int32)  # token positions that the slot's blocks provide
        self.asks_logprobs = np.zeros(num_slots, dtype=bool)
        self.num_constrained = 0  # number of sequences under a grammar
        self.asks_prompt_logprobs = np.zeros(num_slots, dtype=bool)
        self.detects_repetition = np.zeros(num_slots, dtype=bool)  # whether the output is checked for repetition
        self.num_detecting_repetition = 0
        self.is_beam = np.zeros(num_slots, dtype=bool)
        self.num_beams = 0
        self.stop_ids = np.full((2, num_slots), NO_TOKEN, dtype=np.int32)
        self.num_micro_batches = num_micro_batches
        self.micro_batches = np.arange(num_slots) % num_micro_batches  # by slot
        self.free_slots = FreeSlots(num_slots, num_micro_batches)

    def __len__(self) -> int:
        return self.num_slots - len(self.free_slots)

    @property
    def num_free_slots(self) -> int:
        return len(self.free_slots)

    def num_live_of(self, micro_batch: int) -> int:
        """Returns the number of occupied slots of a micro-batch."""
        total = -(-(self.num_slots - micro_batch) // self.num_micro_batches)
        return total - self.free_slots.count(micro_batch)

    def admit(self, sequence: Sequence, num_computed: int, micro_batch: int = 0) -> int:
        """Gives `sequence` the lowest free slot, of this micro-batch if it has one, and fills all columns of the
        slot; its tokens' last block moves into the row. Returns the slot."""
        slot = self.free_slots.allocate(micro_batch)
        num_tokens = self._token_rows.admit(slot, sequence.tokens)
        self.sequences[slot] = sequence
        sequence.slot = slot
        self.live[slot] = True
        self.keys[slot] = sequence.key
        self.order[slot] = sequence.order
        self.owners[slot] = sequence.owner
        self.sequence_ids[slot] = sequence.sequence_id
        self.tenants[slot] = sequence.tenant_index
        self.urgency[slot] = sequence.urgency
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self.num_tokens[slot] = self.num_known_at_admission[slot] = num_tokens
        self.num_computed[slot] = num_computed
        if self._has_drafted:
            self.num_drafts_in_flight[slot] = 0
        self.limit[slot] = sequence.max_total_tokens
        self.max_blocks += self.max_blocks_of(sequence)
        self.capacity[slot] = 0
        if sequence.has_optional_features:
            self._set_optional_columns(slot, sequence)
        self._set_stop_ids(slot, sequence)
        if sequence.samples_nothing:
            self.non_sampling.add(slot)
        if sequence.is_beam or sequence.samples_nothing or num_computed < num_tokens - 1:
            self.prefilling.add(slot)
        return slot

    def max_blocks_of(self, sequence: Sequence) -> int:
        """Returns the maximum number of blocks that `sequence` can need, without sharing."""
        num_blocks = sequence.max_total_tokens // self.block_size + 1
        cross = self._groups.cross_cost(sequence.num_encoder_rows) if sequence.media else 0
        return cross + (num_blocks if self._plain else self._groups.cost(num_blocks))

    def fork(self, parent: int, slot: int) -> None:
        """Makes the tokens and hashes of `slot` a copy of those of `parent`, a beam of the same search."""
        source, target = self.sequence(parent), self.sequence(slot)
        target.tokens.copy_from(source.tokens)
        target.block_hashes[:] = source.block_hashes

    def release(self, slot: int) -> Sequence:
        """Frees the slot and clears its columns; the sequence gets its tokens back from the row. Returns the
        sequence. Raises AssertionError if the slot is free."""
        sequence = self.sequence(slot)
        sequence.tokens.unbind()
        self.max_blocks -= self.max_blocks_of(sequence)
        self.sequences[slot] = None
        if sequence.has_optional_features:
            self._clear_optional_columns(slot, sequence)
        self.live[slot] = False
        self.keys[slot] = -1
        self.order[slot] = -1
        self.prefilling.discard(slot)
        self.non_sampling.discard(slot)
        self.free_slots.free(slot)
        sequence.slot = -1
        return sequence

    def sequence(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def has_progressed(self, sequence: Sequence) -> bool:
        """Returns whether the sequence got a token since its admission."""
        slot = sequence.slot
        return slot >= 0 and bool(self.num_known[slot] > self.num_known_at_admission[slot])

    def ready(self) -> Mask:
        """Returns the mask of slots with exactly one token to compute: those that advance without being named. Beams
        and slots that sample nothing are always named."""
        ready: Mask = self.live & (self.num_computed == self.num_tokens - 1)
        if self.non_sampling:
            ready[list(self.non_sampling)] = False
        return ready & ~self.is_beam if self.num_beams else ready

    def confirmed(self, planned: I32) -> I32:
        """Returns `planned` (num_tokens or num_computed) without the drafts that may be rejected."""
        return planned - self.num_drafts_in_flight if self._has_drafted else planned

    def assume_accepted(self, slots: Slots | int, num_drafts: int) -> None:
        """Counts `num_drafts` drafts of each of `slots` in a planned step as accepted."""
        self._has_drafted = True
        self.num_computed[slots] += num_drafts
        self.num_tokens[slots] += num_drafts
        self.num_drafts_in_flight[slots] += num_drafts

    def resolve_drafts(self, slots: Slots, refused: I32, drafted: I32) -> None:
        """Subtracts the `refused` ones of the `drafted` tokens of each slot, after their step returned."""
        self.num_tokens[slots] -= refused
        self.num_computed[slots] -= refused
        self.num_drafts_in_flight[slots] -= drafted

    def append(self, slots: Slots, tokens: I32) -> list[tuple[Sequence, bytes]]:
        """Appends sampled tokens that were returned, one for each slot; returns the sequences whose last block is
        complete now, with that block as an i32 column."""
        filled, content = self._token_rows.append(slots, tokens)
        size, blocks = self.block_size * TOKEN_BYTES, []
        for begin, slot in zip(range(0, len(content), size), filled, strict=True):
            sequence, block = self.sequences[slot], content[begin : begin + size]
            assert sequence is not None, f"slot {slot} is free"
            sequence.tokens.kept += block
            blocks.append((sequence, block))
        return blocks

    def may_end(self, slots: Slots, tokens: I32) -> Slots:
        """Returns the indices of those of `slots` that the last of their `tokens` may end; ending.py decides."""
        may_end: Mask = self.num_known[slots] >= self.limit[slots]
        if len(self.stop_ids) <= MAX_LOOPED_STOPS:
            for stop_ids in self.stop_ids:
                may_end |= stop_ids[slots] == tokens
        else:
            may_end |= (self.stop_ids[:, slots] == tokens).any(axis=0)
        if self.num_detecting_repetition:
            may_end |= self.detects_repetition[slots]
        return may_end.nonzero()[0]

    def _set_optional_columns(self, slot: int, sequence: Sequence) -> None:
        """Sets the columns of rarely used features: they are False for all other sequences, and in free slots."""
        self.asks_logprobs[slot] = sequence.asks_logprobs
        self.asks_prompt_logprobs[slot] = sequence.asks_prompt_logprobs
        self.num_constrained += bool(sequence.grammar_id)
        self.detects_repetition[slot] = sequence.repetition is not None
        self.num_detecting_repetition += sequence.repetition is not None
        self.is_beam[slot] = sequence.is_beam
        self.num_beams += sequence.is_beam

    def _clear_optional_columns(self, slot: int, sequence: Sequence) -> None:
        """Resets the columns of rarely used features and subtracts the sequence from their counts."""
        for column in (self.asks_logprobs, self.asks_prompt_logprobs, self.detects_repetition, self.is_beam):
            column[slot] = False
        self.num_constrained -= bool(sequence.grammar_id)
        self.num_detecting_repetition -= sequence.repetition is not None
        self.num_beams -= sequence.is_beam

    def _set_stop_ids(self, slot: int, sequence: Sequence) -> None:
        """Writes the end-of-sequence and stop tokens of `sequence` to the slot's column of `stop_ids` [max_stops,
        num_slots], padded with NO_TOKEN; widens the array if the sequence has more than fit."""
        stops = (*sequence.eos_token_ids, *sequence.stop_token_ids)
        width = len(self.stop_ids)
        if len(stops) > width:
            wider = np.full((len(stops) - width, self.num_slots), NO_TOKEN, dtype=np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, wider])
        column = self.stop_ids[:, slot]
        column.fill(NO_TOKEN)
        for index, stop in enumerate(stops):  # a loop over few items is faster than a slice
            column[index] = stop


class TokenRows:
    """Last, partial block of each slot's known tokens, and the number of known tokens: a step returns one token for
    each of many slots. The complete blocks are kept by the sequences (sequences/tokens.py)."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self.num_known: I32 = np.zeros(num_slots, dtype=np.int32)
        self._blocks: I32 = np.zeros((num_slots, block_size), dtype=np.int32)
        self._bytes = self._blocks.reshape(-1).view(np.uint8).data  # the same memory as bytes, row by row
        self._row_bytes = block_size * TOKEN_BYTES

    def admit(self, slot: int, tokens: SequenceTokens) -> int:
        """Moves the last, partial block of a sequence into the slot's row and binds the sequence's tokens to it;
        returns the sequence's number of tokens."""
        num_bytes, size = len(tokens.kept), self._row_bytes
        last = tokens.bind(self, slot, num_bytes - num_bytes % size)
        begin = slot * size
        self._bytes[begin : begin + len(last)] = last
        self.num_known[slot] = num_tokens = num_bytes // TOKEN_BYTES
        return num_tokens

    def after(self, slot: int, num_bytes: int) -> bytes:
        begin = slot * self._row_bytes
        return bytes(self._bytes[begin : begin + int(self.num_known[slot]) * TOKEN_BYTES - num_bytes])

    def copy(self, source: int, target: int) -> None:
        self._blocks[target] = self._blocks[source]

    def append(self, slots: Slots, tokens: I32) -> tuple[list[int], bytes]:
        """Appends a token to each of `slots`; returns the slots whose block is complete now, and these blocks,
        concatenated."""
        known = self.num_known[slots]
        self._blocks[slots, known % self._block_size] = tokens
        known += 1
        self.num_known[slots] = known
        filled = slots[known % self._block_size == 0]
        return (filled.tolist(), self._blocks[filled].tobytes()) if len(filled) else ([], b"")


class FreeSlots:
    """One heap of free slots per micro-batch; slot s belongs to micro-batch s % num_micro_batches."""

    def __init__(self, num_slots: int, num_micro_batches: int) -> None:
        self._heaps = [list(range(first, num_slots, num_micro_batches)) for first in range(num_micro_batches)]
        self._num_free = num_slots

    def __len__(self) -> int:
        return self._num_free

    def count(self, micro_batch: int) -> int:
        return len(self._heaps[micro_batch])

    def allocate(self, micro_batch: int) -> int:
        """Takes the lowest free slot of a micro-batch; if it has none, of the micro-batch with the most free slots."""
        heap = self._heaps[micro_batch] or max(self._heaps, key=len)
        self._num_free -= 1
        return heapq.heappop(heap)

    def free(self, slot: int) -> None:
        heapq.heappush(self._heaps[slot % len(self._heaps)], slot)
        self._num_free += 1
