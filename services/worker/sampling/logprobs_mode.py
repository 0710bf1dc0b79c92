"""What log-probabilities are: of the model's logits or of what they are at the choice, normalised or not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.services.worker.sampling.vocabulary.port import Vocabulary


@dataclass(frozen=True, slots=True)
class LogprobsMode:
    """The setting logprobs_mode, of a whole cluster, and how its numbers are made."""

    vocabulary: Vocabulary
    is_processed: bool  # penalties, bans, temperature and filters included
    is_normalised: bool
    ties_by_id: bool  # of equally likely tokens the lowest ids come first

    @classmethod
    def from_name(cls, name: str, vocabulary: Vocabulary, *, ties_by_id: bool) -> LogprobsMode:
        """raw_logprobs, processed_logprobs, raw_logits or processed_logits"""
        stage, kind = name.split("_")
        return cls(vocabulary, stage == "processed", kind == "logprobs", ties_by_id)

    def values(self, logits: Tensor) -> Tensor:
        """`logits` float32 [n, shard.size]; a copy."""
        return self.vocabulary.log_softmax(logits) if self.is_normalised else logits.clone()

    def most_likely(self, values: Tensor, count: int) -> Tensor:
        """int64 [n, count or as many as there are], of `values` [n, shard.size], best first."""
        return self.vocabulary.most_likely(values, min(count, self.vocabulary.shard.vocab_size), by_id=self.ties_by_id)
