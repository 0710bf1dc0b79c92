"""Selects the vocabulary implementation for a rank."""

from __future__ import annotations

from quire.kernels import Ops
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.sampling.vocabulary.port import Vocabulary
from quire.services.worker.sampling.vocabulary.sharded_vocabulary import ShardedVocabulary
from quire.services.worker.sampling.vocabulary.whole_vocabulary import WholeVocabulary


def open_vocabulary(shard: Shard, vocab_size: int, ops: Ops) -> Vocabulary:
    """Returns a WholeVocabulary if the shard covers all tokens, else the ShardedVocabulary of this rank, whose methods
    run collectives."""
    return WholeVocabulary(vocab_size, ops) if shard.is_whole else ShardedVocabulary(shard, vocab_size, ops)
