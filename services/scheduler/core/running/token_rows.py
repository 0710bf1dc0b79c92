"""Known tokens of running sequences, as one row per slot."""

from __future__ import annotations

import numpy as np

from quire.services.scheduler.core.plan import I32
from quire.services.scheduler.core.sequences.tokens import TOKEN_BYTES, SequenceTokens


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

    def append(self, slots: np.ndarray[tuple[int], np.dtype[np.intp]], tokens: I32) -> tuple[list[int], bytes]:
        """Appends a token to each of `slots`; returns the slots whose block is complete now, and these blocks,
        concatenated."""
        known = self.num_known[slots]
        self._blocks[slots, known % self._block_size] = tokens
        known += 1
        self.num_known[slots] = known
        filled = slots[known % self._block_size == 0]
        return (filled.tolist(), self._blocks[filled].tobytes()) if len(filled) else ([], b"")
