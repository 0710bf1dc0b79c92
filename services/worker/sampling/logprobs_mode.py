"""Defines the numbers reported as log-probabilities: raw or processed logits, normalised or not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.services.worker.sampling.vocabulary.port import Vocabulary


@dataclass(frozen=True, slots=True)
class LogprobsMode:
    """The cluster-wide setting logprobs_mode, and how its values are computed."""

    vocabulary: Vocabulary
    is_processed: bool  # after penalties, bans, temperature and filters
    is_normalised: bool
    ties_by_id: bool  # orders equally likely tokens by ascending id

    @classmethod
    def from_name(cls, name: str, vocabulary: Vocabulary, *, ties_by_id: bool) -> LogprobsMode:
        """Parses raw_logprobs, processed_logprobs, raw_logits or processed_logits."""
        stage, kind = name.split("_")
        return cls(vocabulary, stage == "processed", kind == "logprobs", ties_by_id)

    def values(self, logits: Tensor) -> Tensor:
        """Returns the reported values of `logits`, float32 [n, shard.size], as a copy: log-softmax of them, or the
        logits themselves in the modes *_logits."""
        return self.vocabulary.log_softmax(logits) if self.is_normalised else logits.clone()

    def most_likely(self, values: Tensor, count: int) -> Tensor:
        """Returns the ids of the `count` largest `values` [n, shard.size], best first: int64 [n, min(count,
        vocab_size)]."""
        return self.vocabulary.most_likely(values, min(count, self.vocabulary.shard.vocab_size), by_id=self.ties_by_id)
