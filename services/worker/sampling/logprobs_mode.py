"""What log-probabilities are: of the model's logits or of what they are at the choice, normalised or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.reference import log_softmax
from services.worker.sampling.ranking import largest_by_id


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
        """int64 [n, count], of `values` [n, vocab_size], best first."""
        return largest_by_id(values, count) if self.ties_by_id else values.topk(count, dim=1).indices
