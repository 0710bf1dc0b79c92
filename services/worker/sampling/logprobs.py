"""logprobs and logprob_token_ids: log-probabilities of the sampled token and of the most likely or the named tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.features.component import check_token_ids
from quire.services.worker.sampling.logprobs_mode import LogprobsMode
from quire.services.worker.sampling.vocabulary.port import Vocabulary
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.result import LogprobEntries
from quire.services.worker.step.slots import Rows
from quire.shared import columns
from quire.shared.columns import F32, I32, U32
from quire.shared.errors import InvalidArgument

WHOLE_VOCABULARY = -1
NOT_REQUESTED = -1
NO_TOKEN_ID = -1


class SlotLogprobs:
    """Holds by slot how many log-probability entries a sequence asked for, or which token ids it named."""

    parameters = frozenset({"logprobs", "logprob_token_ids", "beam_search"})

    def __init__(self, num_slots: int, max_logprobs: int, device: torch.device, mode: LogprobsMode) -> None:
        self.mode = mode
        self._vocab_size = vocab_size = mode.vocabulary.shard.vocab_size
        self._max_logprobs = vocab_size if max_logprobs == WHOLE_VOCABULARY else max_logprobs
        self._device = device
        self._wanted = np.full(num_slots, NOT_REQUESTED, dtype=np.int32)
        self._named: dict[int, I32] = {}  # requested token ids by slot
        self._beams: set[int] = set()

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores what the sequence asks for: the entries of a beam search, named token ids, or a number of entries;
        nothing if it asks for none. Raises InvalidArgument beyond max_logprobs or for an id outside of the
        vocabulary."""
        sampling = admission.sampling
        if sampling.HasField("beam_search"):
            self._wanted[slot] = min(sampling.logprobs, self._vocab_size)  # max_logprobs does not limit a beam search
            self._beams.add(slot)
        elif sampling.logprob_token_ids:
            named = columns.i32(columns.u32_bytes(sampling.logprob_token_ids))
            check_token_ids(named, self._vocab_size, "logprob_token_ids")
            self._named[slot] = named
            self._wanted[slot] = len(named)
        elif sampling.HasField("logprobs"):
            self._wanted[slot] = self.count(sampling.logprobs, "logprobs")

    def count(self, asked: int, field: str) -> int:
        """Returns the number of entries in addition to the sampled token's own, at most the vocabulary's size; -1 asks
        for the whole vocabulary. Raises InvalidArgument naming `field` if that exceeds max_logprobs."""
        wanted = self._vocab_size if asked == WHOLE_VOCABULARY else asked
        if wanted > self._max_logprobs:
            raise InvalidArgument(
                f"{field}: {wanted} exceeds the worker's max_logprobs, {self._max_logprobs}", field=field
            )
        return min(wanted, self._vocab_size)

    def release(self, slot: int) -> None:
        self._wanted[slot] = NOT_REQUESTED
        self._named.pop(slot, None)
        self._beams.discard(slot)

    def bind(self, slots: Rows) -> BoundLogprobs | None:
        """Prepares the rows that asked for log-probabilities; None if there are none."""
        wanted = self._wanted[slots]
        rows = np.flatnonzero(wanted != NOT_REQUESTED)
        if not len(rows):
            return None
        beams = [row for row, slot in enumerate(slots[rows].tolist()) if slot in self._beams] if self._beams else []
        names = self._names(slots[rows], wanted[rows])
        return BoundLogprobs(self.mode, rows, wanted[rows], names, beams, device=self._device)

    def _names(self, slots: Rows, wanted: I32) -> I32 | None:
        """Returns the named ids, [num_asked, max_wanted], NO_TOKEN_ID where the most likely tokens are wanted; None if
        no slot named any."""
        if not self._named:
            return None
        names = np.full((len(slots), int(wanted.max())), NO_TOKEN_ID, dtype=np.int32)
        for row, slot in enumerate(slots.tolist()):
            if slot in self._named:
                names[row, : wanted[row]] = self._named[slot]
        return names


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of the rows that asked for them; columns beyond what a row asked for are cut off later."""

    num_wanted: I32  # [num_asked], on the host
    token_ids: Tensor  # int32 [num_asked, 1 + max_wanted], the sampled token first
    logprobs: Tensor  # float32, same shape
    ranks: Tensor  # int32 [num_asked] rank of the sampled token, from 1

    def columns(self, token_ids: I32, logprobs: F32, ranks: U32) -> LogprobEntries:
        """Builds the result columns from the values of the three tensors, copied to the host: cuts each row to what it
        asked for; rows without a sampled token have no entries."""
        entry_counts = self.num_wanted + 1
        has_token = token_ids[:, 0] >= 0
        if not has_token.all():
            entry_counts, token_ids = entry_counts[has_token], token_ids[has_token]
            logprobs, ranks = logprobs[has_token], ranks[has_token]
        wanted = np.arange(token_ids.shape[1]) < entry_counts[:, None]
        counts, ranks = entry_counts.astype(np.uint32), ranks.astype(np.uint32)
        return LogprobEntries(counts, token_ids[wanted], logprobs[wanted], ranks)


class BoundLogprobs:
    """Collects log-probabilities of the rows that asked: the sampler passes the values of the stage that the mode
    names, then the chosen tokens."""

    def __init__(
        self,
        mode: LogprobsMode,
        rows: Rows,
        num_wanted: I32,
        names: I32 | None,
        beams: list[int],
        *,
        device: torch.device,
    ) -> None:
        """`beams`: indices into `rows` of beams of a search; their values include every feature but temperature and
        filters, independently of the mode."""
        self.mode = mode
        self._beams = upload(beams, device, np.int64) if beams else None
        self.rows = upload(rows, device)
        self._num_wanted = num_wanted
        self._names = None if names is None else upload(names, device, np.int64)
        self._most = int(num_wanted.max())

    def replace_beam_rows(self, values: Tensor, logits: Tensor) -> None:
        """Overwrites the beams' rows in `values` with log-softmax of the `logits` [num_rows, shard.size] of their
        candidates."""
        if self._beams is not None:
            values[self._beams] = self.mode.vocabulary.log_softmax(logits[self.rows[self._beams]])

    def collect(self, values: Tensor, sampled: Tensor) -> RowLogprobs:
        """Returns the entries of `values` [num_asked, shard.size] for the chosen tokens `sampled` [num_rows], -1 for
        none."""
        chosen = sampled[self.rows].long().unsqueeze(1)  # [num_asked, 1]
        return entries(self.mode.vocabulary, values, chosen, self._others(values), self._num_wanted)

    def _others(self, values: Tensor) -> Tensor:
        """Returns the token ids reported next to the sampled one, int64 [num_asked, max_wanted]: the most likely ones,
        or those that the row named."""
        best = self.mode.most_likely(values, self._most)
        return best if self._names is None else named_or_best(self._names, best)


def named_or_best(names: Tensor, best: Tensor) -> Tensor:
    """Returns `names`, int64 [n, max_wanted], with NO_TOKEN_ID replaced by `best`, which may have fewer columns."""
    padded = torch.zeros_like(names)
    padded[:, : best.size(1)] = best
    return torch.where(names == NO_TOKEN_ID, padded, names)


def entries(vocabulary: Vocabulary, values: Tensor, chosen: Tensor, others: Tensor, num_wanted: I32) -> RowLogprobs:
    """Looks up `chosen` int64 [n, 1], -1 for none, and `others` int64 [n, max_wanted] in `values` [n, shard.size], and
    ranks `chosen` among all tokens. Stays on the device; with a sharded vocabulary it runs collectives."""
    token_ids = torch.cat((chosen, others), dim=1)
    logprobs = vocabulary.gather(values, token_ids.clamp(min=0))
    return RowLogprobs(
        num_wanted=num_wanted,
        token_ids=token_ids.int(),
        logprobs=logprobs,
        ranks=vocabulary.count_at_least(values, logprobs[:, :1]),
    )
