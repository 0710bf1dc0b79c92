"""Operations of sampling that need all tokens' logits, wherever these lie.

All other changes of logits are made token by token on each rank's shard. If the vocabulary is sharded, all ranks call
the same methods in the same order and get bit-identical answers.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.services.worker.sampling.vocabulary.columns import ChoiceColumns
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard


class Vocabulary(Protocol):
    """Operations over the vocabulary. `logits` and `values`: [num_rows, shard.size] of this rank's tokens."""

    @property
    def shard(self) -> VocabShard: ...

    @property
    def accepts_16_bit(self) -> bool:
        """Whether sample() without filters accepts 16-bit logits; all other methods take float32."""

    def sample(self, logits: Tensor, columns: ChoiceColumns, seeds: Tensor, positions: Tensor) -> Tensor:
        """Computes quire.kernels.reference.sample: int32 [num_rows]; may overwrite `logits`."""

    def filtered(self, logits: Tensor, columns: ChoiceColumns) -> Tensor:
        """Returns the logits that sample() draws from: divided by temperature, -inf where a filter dropped a token."""

    def draw(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draws a token per row from unnormalised log-probabilities: int64 [num_rows], any token where no logit is
        finite."""

    def softmax(self, logits: Tensor) -> Tensor:
        """Returns a copy of `logits` as probabilities, normalised over the whole vocabulary."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Returns a copy of `logits` as log-probabilities, normalised over the whole vocabulary."""

    def most_likely(self, values: Tensor, count: int, *, by_id: bool) -> Tensor:
        """Returns token ids, best first, int64 [num_rows, count]; `by_id` orders equal values by ascending id."""

    def gather(self, values: Tensor, token_ids: Tensor) -> Tensor:
        """Returns the values of `token_ids`, int64 [num_rows, n], in that shape; every rank gets the values of all
        ids."""

    def count_at_least(self, values: Tensor, least: Tensor) -> Tensor:
        """Counts the tokens of the whole vocabulary whose value is not below `least` [num_rows, 1]: int32 [num_rows],
        the rank of a token with that value."""

    def all_reduce_max(self, of_part: Tensor) -> Tensor:
        """Returns the elementwise maximum over the ranks."""

    def all_reduce_sum(self, of_part: Tensor) -> Tensor:
        """Returns the elementwise sum over the ranks."""

    def all_gather(self, logits: Tensor) -> Tensor:
        """Returns the logits of all ranks, [num_rows, vocab_size], for operations that need whole rows."""

    def local_logits(self, whole: Tensor) -> Tensor:
        """Returns this rank's columns of `whole` [num_rows, vocab_size], padded to shard.size with -inf; the inverse of
        all_gather()."""
