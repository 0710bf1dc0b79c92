"""Known tokens of one sequence: prompt and output."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = 4


class LastBlocks(Protocol):
    """Rows that hold the last, partial block of known tokens of every slot (TokenRows of running/running.py)."""

    @property
    def num_known(self) -> npt.NDArray[np.int32]:
        """[num_slots] number of known tokens, those of complete blocks included."""

    def after(self, slot: int, num_bytes: int) -> bytes:
        """Returns the known tokens of a slot without their first `num_bytes` bytes, which its sequence keeps: an i32
        column of the last block only."""

    def copy(self, source: int, target: int) -> None:
        """Copies the row of one slot to another."""


class SequenceTokens:
    """All known tokens of a sequence as an i32 column: the prompt, then the output.

    A running sequence keeps its complete blocks; the last block, which each step extends for all slots at once, is a
    row of LastBlocks. Every method treats both as one column.
    """

    __slots__ = ("_rows", "_slot", "kept")

    def __init__(self, content: bytes = b"") -> None:
        self.kept = bytearray(content)  # all tokens; while the sequence holds a slot, only its complete blocks
        self._rows: LastBlocks | None = None
        self._slot = -1  # slot of the row, if there is one

    def __len__(self) -> int:
        """Returns the number of tokens."""
        rows = self._rows
        return len(self.kept) // TOKEN_BYTES if rows is None else int(rows.num_known[self._slot])

    def __bytes__(self) -> bytes:
        return bytes(self.kept) if self._rows is None else bytes(self.kept) + self._last()

    def column(self, begin: int, end: int) -> bytes:
        """Returns the tokens [begin, end), as far as they are known."""
        first, last, num_kept = begin * TOKEN_BYTES, end * TOKEN_BYTES, len(self.kept)
        if last <= num_kept:
            return bytes(self.kept[first:last])
        tail = self._last()[max(0, first - num_kept) : last - num_kept]
        return bytes(self.kept[first:]) + tail if first < num_kept else tail

    def ids(self) -> list[int]:
        return list(np.frombuffer(bytes(self), dtype=np.int32).tolist())

    def append(self, token: int) -> None:
        """Appends a token to a sequence that holds no slot."""
        assert self._rows is None, "a step extends the rows of all slots at once"
        self.kept += int(token).to_bytes(TOKEN_BYTES, "little", signed=True)

    def bind(self, rows: LastBlocks, slot: int, num_kept: int) -> bytearray:
        """Moves the tokens after the first `num_kept` bytes to a row; returns them, for the caller to store there."""
        last = self.kept[num_kept:]
        del self.kept[num_kept:]
        self._rows, self._slot = rows, slot
        return last

    def unbind(self) -> None:
        """Moves the last block back from the slot's row, because the sequence loses its slot; the row must still
        hold it."""
        assert self._rows is not None, "it was put there"
        self.kept += self._rows.after(self._slot, len(self.kept))
        self._rows = None

    def copy_from(self, other: SequenceTokens) -> None:
        """Replaces all tokens by those of another running sequence of the same length."""
        assert self._rows is not None, "beams hold slots"
        self.kept[:] = other.kept
        self._rows.copy(other._slot, self._slot)

    def _last(self) -> bytes:
        return b"" if self._rows is None else self._rows.after(self._slot, len(self.kept))
