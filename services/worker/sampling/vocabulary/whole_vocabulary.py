"""Vocabulary of a rank that holds all tokens."""

from __future__ import annotations

from torch import Tensor

from quire.kernels import Ops
from quire.kernels.reference.sampling.noise import gumbel_noise
from quire.kernels.reference.sampling.sampling import filtered
from quire.services.worker.sampling.ranking import largest_by_id
from quire.services.worker.sampling.vocabulary.columns import ChoiceColumns
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard


class WholeVocabulary:
    """Vocabulary of a rank that holds all tokens: calls the sampling kernels directly; all_reduce_max(),
    all_reduce_sum(), all_gather() and local_logits() return their argument."""

    def __init__(self, vocab_size: int, ops: Ops) -> None:
        self.shard = VocabShard.unsharded(vocab_size)
        self.accepts_16_bit = ops.sources["sample"] == "quire.kernels.triton"
        self._sample, self._log_softmax = ops.sample, ops.log_softmax

    def sample(self, logits: Tensor, columns: ChoiceColumns, seeds: Tensor, positions: Tensor) -> Tensor:
        filters = columns.top_k, columns.top_p, columns.min_p
        return self._sample(logits, columns.temperature, *filters, seeds, positions)

    def filtered(self, logits: Tensor, columns: ChoiceColumns) -> Tensor:
        return filtered(logits, *columns.all)

    def draw(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return (logits + gumbel_noise(seeds, positions, logits.size(1))).argmax(dim=1)

    def softmax(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=1)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return self._log_softmax(logits)

    def most_likely(self, values: Tensor, count: int, *, by_id: bool) -> Tensor:
        return largest_by_id(values, count) if by_id else values.topk(count, dim=1).indices

    def gather(self, values: Tensor, token_ids: Tensor) -> Tensor:
        return values.gather(1, token_ids)

    def count_at_least(self, values: Tensor, least: Tensor) -> Tensor:
        return (values >= least).sum(dim=1).int()

    def all_reduce_max(self, of_part: Tensor) -> Tensor:
        return of_part

    def all_reduce_sum(self, of_part: Tensor) -> Tensor:
        return of_part

    def all_gather(self, logits: Tensor) -> Tensor:
        return logits

    def local_logits(self, whole: Tensor) -> Tensor:
        return whole
