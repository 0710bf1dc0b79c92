"""What sampling has to know of all tokens, whoever has their logits.

Everything else that is done to logits is done token by token, to those that are here. Where the vocabulary is divided
among ranks, all of them call the same methods in the same order, and get the same answers, to the bit.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from quire.services.worker.sampling.vocabulary.columns import ChoiceColumns
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard


class Vocabulary(Protocol):
    """`logits` and `values`: [num_rows, shard.size] of the tokens that are here."""

    @property
    def shard(self) -> VocabShard: ...

    @property
    def accepts_16_bit(self) -> bool:
        """Whether sample() without filters takes logits of 16 bits; everything else wants float32."""

    def sample(self, logits: Tensor, columns: ChoiceColumns, seeds: Tensor, positions: Tensor) -> Tensor:
        """quire.kernels.reference.sample: int32 [num_rows]; may overwrite `logits`."""

    def filtered(self, logits: Tensor, columns: ChoiceColumns) -> Tensor:
        """What sample() draws from: logits by temperature, -inf where a filter dropped a token."""

    def draw(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """int64 [num_rows]: by these logarithms of chances alone; any token where no logit is finite."""

    def softmax(self, logits: Tensor) -> Tensor:
        """A copy."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """A copy."""

    def most_likely(self, values: Tensor, count: int, *, by_id: bool) -> Tensor:
        """int64 [num_rows, count] token ids, best first. `by_id`: of equals the lowest ids come first."""

    def gather(self, values: Tensor, token_ids: Tensor) -> Tensor:
        """[num_rows, n] of `token_ids`, int64 of that shape."""

    def count_at_least(self, values: Tensor, least: Tensor) -> Tensor:
        """int32 [num_rows]: tokens whose value is not below `least` [num_rows, 1]."""

    def all_reduce_max(self, of_part: Tensor) -> Tensor:
        """Of what each shard has found, element by element."""

    def all_reduce_sum(self, of_part: Tensor) -> Tensor:
        """The sum of what each shard has found, element by element."""

    def all_gather(self, logits: Tensor) -> Tensor:
        """[num_rows, vocab_size]: for what cannot be done shard by shard. It crosses ranks as it is."""

    def local_logits(self, whole: Tensor) -> Tensor:
        """The shard of it that is here."""
