"""bad_words: bans a word's last token where the output ends with the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import Positions, check_token_ids
from quire.services.worker.sampling.features.output_tails import BoundTails, OutputTails
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared import columns
from quire.shared.columns import I32

ANY = -1  # in a prefix: matches every token


class BadWords:
    """Sampling feature that holds the banned words of each slot as token ids, and the tail of its output on the device,
    as long as the longest word less its last token."""

    parameters = frozenset({"bad_word_token_ids"})

    def __init__(self, num_slots: int, shard: VocabShard, device: torch.device) -> None:
        self._shard = shard
        self._device = device
        self._words: dict[int, Sequence[I32]] = {}
        self._tails = OutputTails(num_slots, device)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the slot's non-empty words and the end of its output so far; does nothing without words. Raises
        InvalidArgument for an id outside of the vocabulary."""
        words = [columns.i32(word) for word in admission.bad_word_token_ids if word]
        if not words:
            return
        check_token_ids(np.concatenate(words), self._shard.vocab_size, "bad_words")
        output = columns.i32(admission.token_ids)[admission.num_prompt_tokens :]
        self._tails.start_slot(slot, output, max(map(len, words)) - 1)
        self._words[slot] = words

    def release(self, slot: int) -> None:
        self._words.pop(slot, None)

    def bind(self, slots: Rows) -> BoundBadWords | None:
        """Prepares the rows of slots with banned words; None if there are none."""
        if not self._words:
            return None
        active = {row: self._words[slot] for row, slot in enumerate(slots.tolist()) if slot in self._words}
        if not active:
            return None
        rows = np.array(list(active))
        tails = BoundTails(self._tails, rows, slots[rows], self._device)
        return BoundBadWords(active, tails, self._tails.width, self._shard, device=self._device)


class BoundBadWords:
    """Banned words of a step's rows whose last token lies in this rank's shard: their prefixes as one matrix, int32
    [num_words, width], right-aligned and padded with ANY."""

    def __init__(
        self,
        active: dict[int, Sequence[I32]],
        tails: BoundTails,
        width: int,
        shard: VocabShard,
        *,
        device: torch.device,
    ) -> None:
        self._tails = tails
        entries = [
            (index, row, word)
            for index, (row, words) in enumerate(active.items())
            for word in words
            if shard.has(word[-1:]).all()
        ]
        prefixes = np.full((len(entries), width), ANY, dtype=np.int32)
        for i, (_, _, word) in enumerate(entries):
            prefixes[i, width - (len(word) - 1) :] = word[:-1]
        self._tail_of, self._rows, self._last, self._prefixes = (
            upload(values, device, dtype)
            for values, dtype in (
                ([index for index, _, _ in entries], np.int64),
                ([row for _, row, _ in entries], np.int64),
                ([int(word[-1]) - shard.first for _, _, word in entries], np.int64),
                (prefixes, np.int32),
            )
        )

    def apply(self, logits: Tensor, positions: Positions) -> None:
        """Sets the logit of a word's last token to -inf, in place, in each row whose output, drafts included, ends with
        the tokens before it. A word of one token is always banned."""
        tails = self._tails.read(positions)[self._tail_of]
        completes = ((tails == self._prefixes) | (self._prefixes == ANY)).all(dim=1)
        bans = torch.zeros(completes.shape, device=completes.device).masked_fill_(completes, float("-inf"))
        logits.index_put_((self._rows, self._last), bans, accumulate=True)

    def sampled(self, token_ids: Tensor) -> None:
        """Appends the sampled tokens to the output tails of the slots with banned words."""
        self._tails.sampled(token_ids)
