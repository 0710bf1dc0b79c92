"""What log-probabilities are: of the model's logits or of what they are at the choice, normalised or not."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.sampling.component import Tensor


@dataclass(frozen=True, slots=True)
class LogprobsMode:
    """The setting logprobs_mode, of a whole cluster."""

    is_processed: bool = False  # penalties, bans, temperature and filters included
    is_normalised: bool = True

    @classmethod
    def of(cls, name: str) -> LogprobsMode:
        """raw_logprobs, processed_logprobs, raw_logits or processed_logits"""
        stage, kind = name.split("_")
        return cls(stage == "processed", kind == "logprobs")

    def values(self, logits: Tensor) -> Tensor:
        """`logits` float32 [n, vocab_size]; a copy."""
        return logits.log_softmax(dim=1) if self.is_normalised else logits.clone()
