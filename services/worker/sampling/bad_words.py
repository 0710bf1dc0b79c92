"""bad_words: a word's last token is banned where the output ends with the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from services.worker.sampling.component import Positions, Tensor, check_token_ids, upload
from services.worker.slots import Rows
from shared import columns
from shared.columns import I32
from shared.pb.worker.v1 import worker_pb2 as pb

ANY = -1  # in a prefix: matches every token
NONE = -2  # in a tail: before the output began


class BadWords:
    """Words by slot, and on the device the last tokens of each slot's output."""

    def __init__(self, num_slots: int, vocab_size: int, device: Any) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._words: dict[int, Sequence[I32]] = {}
        self.tails: Tensor = torch.full((num_slots, 0), NONE, dtype=torch.int32, device=device)

    def admit(self, slot: int, admission: pb.Admission) -> None:
        words = [columns.i32(word) for word in admission.bad_word_token_ids if word]
        if not words:
            return
        check_token_ids(np.concatenate(words), self._vocab_size, "bad_words")
        self._widen(max(map(len, words)) - 1)
        width = self.tails.size(1)
        tail = np.full(width, NONE, dtype=np.int32)
        output = columns.i32(admission.token_ids)[admission.num_prompt_tokens :]
        kept = output[max(0, len(output) - width) :]
        tail[width - len(kept) :] = kept
        self.tails[slot] = upload(tail, self._device)
        self._words[slot] = words

    def release(self, slot: int) -> None:
        self._words.pop(slot, None)

    def bind(self, slots: Rows) -> BoundBadWords | None:
        if not self._words:
            return None
        active = {row: slot for row, slot in enumerate(slots.tolist()) if slot in self._words}
        return BoundBadWords(self, active, self._words, self._device) if active else None

    def _widen(self, width: int) -> None:
        """Room for longer words; what is further back than it was is not known, and no admitted word asks for it."""
        lacking = width - self.tails.size(1)
        if lacking > 0:
            before = self.tails.new_full((self.tails.size(0), lacking), NONE)
            self.tails = torch.cat((before, self.tails), dim=1)


class BoundBadWords:
    """All words of the rows side by side."""

    def __init__(self, owner: BadWords, active: dict[int, int], words: dict[int, Sequence[I32]], device: Any) -> None:
        self._owner = owner
        width = owner.tails.size(1)
        entries = [(row, slot, word) for row, slot in active.items() for word in words[slot]]
        prefixes = np.full((len(entries), width), ANY, dtype=np.int32)
        for i, (_, _, word) in enumerate(entries):
            prefixes[i, width - (len(word) - 1) :] = word[:-1]
        self._rows, self._slots, self._last, self._prefixes, self._active_rows, self._active_slots = (
            upload(values, device)
            for values in (
                [row for row, _, _ in entries],
                [slot for _, slot, _ in entries],
                [int(word[-1]) for _, _, word in entries],
                prefixes,
                list(active),
                list(active.values()),
            )
        )

    def apply(self, logits: Tensor, positions: Positions) -> None:
        tails = self._owner.tails[self._slots]
        completes = ((tails == self._prefixes) | (self._prefixes == ANY)).all(dim=1)
        bans = torch.zeros(completes.shape, device=completes.device).masked_fill_(completes, float("-inf"))
        logits.index_put_((self._rows, self._last), bans, accumulate=True)

    def sampled(self, token_ids: Tensor) -> None:
        tails = self._owner.tails
        if tails.size(1):
            newest = token_ids[self._active_rows].unsqueeze(1).to(tails.dtype)
            tails[self._active_slots] = torch.cat((tails[self._active_slots, 1:], newest), dim=1)
