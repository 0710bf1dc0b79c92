"""logprobs: of the sampled token and the most likely ones, from the logits as the model gave them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.sampling.component import Tensor, upload
from services.worker.slots import Rows
from shared import columns
from shared.columns import F32, I32, U32
from shared.errors import InvalidArgument
from shared.pb.worker.v1 import worker_pb2 as pb

WHOLE_VOCABULARY = -1
UNASKED = -1


class Logprobs:
    """How many entries each slot asked for."""

    def __init__(self, num_slots: int, vocab_size: int, max_logprobs: int, device: Any) -> None:
        self._vocab_size = vocab_size
        self._max_logprobs = max_logprobs
        self._device = device
        self._wanted = np.full(num_slots, UNASKED, dtype=np.int32)

    def admit(self, slot: int, admission: pb.Admission) -> None:
        if not admission.sampling.HasField("logprobs"):
            return
        wanted = admission.sampling.logprobs
        wanted = self._vocab_size if wanted == WHOLE_VOCABULARY else wanted
        if wanted > self._max_logprobs:
            raise InvalidArgument(
                f"logprobs: {wanted} is more than this worker returns, {self._max_logprobs}", field="logprobs"
            )
        self._wanted[slot] = min(wanted, self._vocab_size)

    def release(self, slot: int) -> None:
        self._wanted[slot] = UNASKED

    def bind(self, slots: Rows) -> BoundLogprobs | None:
        wanted = self._wanted[slots]
        rows = np.flatnonzero(wanted != UNASKED)
        return BoundLogprobs(rows, wanted[rows], self._device) if len(rows) else None


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Of the rows that asked; columns beyond what a row asked for are to be cut."""

    num_wanted: I32  # [num_asked], on the host
    token_ids: Tensor  # int32 [num_asked, 1 + most wanted], the sampled token first
    logprobs: Tensor  # float32, same shape
    ranks: Tensor  # int32 [num_asked] of the sampled token, from 1

    def to_proto(self, token_ids: I32, logprobs: F32, ranks: U32) -> pb.LogprobColumns:
        """The arguments are the tensors' values, on the host."""
        entry_counts = self.num_wanted + 1
        wanted = np.arange(token_ids.shape[1]) < entry_counts[:, None]
        return pb.LogprobColumns(
            entry_counts=columns.u32_bytes(entry_counts),
            token_ids=columns.i32_bytes(token_ids[wanted]),
            logprobs=columns.f32_bytes(logprobs[wanted]),
            ranks=columns.u32_bytes(ranks),
        )


class BoundLogprobs:
    """Looks at the rows that asked: at the logits before anything changes them, then at the choice."""

    def __init__(self, rows: Rows, num_wanted: I32, device: Any) -> None:
        self._rows = upload(rows, device)
        self._num_wanted = num_wanted
        self._most = int(num_wanted.max())

    def look(self, logits: Tensor) -> Tensor:
        """float32 [num_asked, vocab_size]"""
        return logits[self._rows].log_softmax(dim=1)

    def collect(self, logprobs: Tensor, sampled: Tensor) -> RowLogprobs:
        """`logprobs`: from look(); `sampled` [num_rows]: the tokens chosen."""
        chosen = sampled[self._rows].long().unsqueeze(1)  # [num_asked, 1]
        own = logprobs.gather(1, chosen)
        best = logprobs.topk(self._most, dim=1)
        return RowLogprobs(
            num_wanted=self._num_wanted,
            token_ids=torch.cat((chosen, best.indices), dim=1).int(),
            logprobs=torch.cat((own, best.values), dim=1),
            ranks=(logprobs >= own).sum(dim=1).int(),
        )
