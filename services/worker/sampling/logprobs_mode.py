"""What log-probabilities are: of the model's logits or of what they are at the choice, normalised or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.reference import log_softmax
from services.worker.sampling.component import Tensor

LARGEST_ID = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class LogprobsMode:
    """The setting logprobs_mode, of a whole cluster, and how its numbers are made."""

    is_processed: bool = False  # penalties, bans, temperature and filters included
    is_normalised: bool = True
    log_softmax: Callable[[Tensor], Tensor] = log_softmax
    ties_by_id: bool = False  # of equally likely tokens the lowest ids come first

    @classmethod
    def of(cls, name: str, log_softmax: Callable[[Tensor], Tensor], *, ties_by_id: bool) -> LogprobsMode:
        """raw_logprobs, processed_logprobs, raw_logits or processed_logits"""
        stage, kind = name.split("_")
        return cls(stage == "processed", kind == "logprobs", log_softmax, ties_by_id)

    def values(self, logits: Tensor) -> Tensor:
        """`logits` float32 [n, vocab_size]; a copy."""
        return self.log_softmax(logits) if self.is_normalised else logits.clone()

    def most_likely(self, values: Tensor, count: int) -> Tensor:
        """int64 [n, count], of `values` [n, vocab_size], best first.

        Which of equal ones topk takes depends on `count`, the most that any row of the step has asked for.
        """
        ranked = _ranks(values) if self.ties_by_id else values
        return ranked.topk(count, dim=1).indices


def _ranks(values: Tensor) -> Tensor:
    """int64, all different in a row: ordered as the float32 `values`, equal ones by descending id."""
    bits = values.view(torch.int32).long()
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (ordered << 32) + (LARGEST_ID - torch.arange(values.size(1), device=values.device))
