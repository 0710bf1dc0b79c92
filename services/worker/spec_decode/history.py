"""Known tokens of every slot, on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.step.slots import Rows
from quire.shared.columns import I32

MAX_PENDING_STEPS = 64  # steps
NOT_IN_STEP = -2  # the slot took no part in the step; -1 is a token that could not be sampled


class TokenHistory:
    """Tokens by slot. Rows that are not in use cost no memory until they are written.

    While no step has drafts the history is not read: steps with a token per slot are buffered and written together (3
    µs per step of 256 rows instead of 18), in separate memory, so that the step's arrays can be reused at once. Slots
    may have changed their sequence by then, so that a buffered step also records how many sequences had started at its
    launch.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        num_slots = limits.max_num_seqs
        self._tokens = np.zeros((num_slots, limits.max_model_len + 1), dtype=np.int32)
        self._lengths = np.zeros(num_slots, dtype=np.int32)
        self.num_begun = 0  # sequences started so far
        self._sequence_numbers = np.zeros(num_slots, dtype=np.int64)  # ordinal of each slot's current sequence
        self._pending: list[tuple[Rows, int]] = []  # buffered steps: slots, num_begun at launch
        self._kept = np.zeros((MAX_PENDING_STEPS, num_slots), dtype=np.int32)  # tokens of each buffered step

    @property
    def tokens(self) -> I32:
        """Tokens by slot, [max_num_seqs, max_model_len + 1]."""
        self._write_pending()
        return self._tokens

    @property
    def lengths(self) -> I32:
        """Number of known tokens by slot, [max_num_seqs]."""
        self._write_pending()
        return self._lengths

    def tokens_of(self, slot: int) -> I32:
        """Returns the known tokens of `slot`, as a view."""
        row: I32 = self.tokens[slot, : self._lengths[slot]]
        return row

    def is_unchanged_since(self, slots: Rows, num_begun: int) -> npt.NDArray[np.bool_]:
        """Tells whether each slot holds the sequence that it held when `num_begun` sequences had started."""
        unchanged: npt.NDArray[np.bool_] = self._sequence_numbers[slots] <= num_begun
        return unchanged

    def start_sequence(self, slot: int, token_ids: I32) -> None:
        """Replaces the tokens of `slot` by those of a new sequence."""
        self.num_begun += 1
        self._sequence_numbers[slot] = self.num_begun
        self._tokens[slot, : len(token_ids)] = token_ids
        self._lengths[slot] = len(token_ids)

    def append_each(self, slots: Rows, token_ids: I32, num_begun: int) -> None:
        """Buffers a token for each of `slots`; it is appended later, unless the slot has started another sequence since
        `num_begun` sequences had started. A full buffer is written at once."""
        pending = self._pending
        self._kept[len(pending), : len(slots)] = token_ids
        pending.append((slots, num_begun))
        if len(pending) == MAX_PENDING_STEPS:
            self._write_pending()

    def extend(self, slots: Rows, counts: I32, token_ids: I32) -> None:
        """Appends `counts` tokens to each of `slots`; `token_ids` lists them slot after slot. Stores missing tokens
        (-1) as 0 and cuts rows off at max_model_len + 1."""
        self._write_pending()
        self._append(slots, counts, token_ids)

    def _write_pending(self) -> None:
        """Writes the buffered steps to the history, without tokens of slots whose sequence changed after a step's
        launch."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        first, kept = pending[0][0], self._kept[: len(pending)]
        if all(slots is first and num_begun == self.num_begun for slots, num_begun in pending):
            self._append_to_all(first, kept[:, : len(first)])
            return
        steps = np.full_like(kept, NOT_IN_STEP)
        for step, tokens, (slots, _) in zip(steps, kept, pending, strict=True):
            step[slots] = tokens[: len(slots)]
        steps[np.array([[num_begun] for _, num_begun in pending]) < self._sequence_numbers] = NOT_IN_STEP
        present = steps != NOT_IN_STEP
        always = present.all(axis=0)
        slots = np.flatnonzero(always)
        self._append_to_all(slots, steps[:, slots])
        others = np.flatnonzero(present.any(axis=0) & ~always)
        which = present[:, others]
        self._append(others, which.sum(axis=0, dtype=np.int32), steps[:, others].T[which.T])

    def _append_to_all(self, slots: Rows, steps: I32) -> None:
        """Appends `steps` [num_steps, num_slots], a token per step and slot; missing tokens (-1) become 0."""
        lengths, count = self._lengths[slots], len(steps)
        if int(lengths.max(initial=0)) + count > self._tokens.shape[1]:
            self._append(slots, np.full(len(slots), count, dtype=np.int32), steps.T.ravel())
            return
        self._tokens[slots, lengths + np.arange(count)[:, None]] = np.maximum(steps, 0)
        self._lengths[slots] = lengths + count

    def _append(self, slots: Rows, counts: I32, token_ids: I32) -> None:
        """Appends `counts` tokens to each of `slots`, slot after slot, and drops those that exceed a row."""
        lengths, longest = self._lengths[slots], self._tokens.shape[1]
        within = np.arange(len(token_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows, places = np.repeat(slots, counts), np.repeat(lengths, counts) + within
        fits = places < longest
        self._tokens[rows[fits], places[fits]] = np.maximum(token_ids[fits], 0)
        self._lengths[slots] = np.minimum(lengths + counts, longest)
