"""Which of them a rank has."""

from __future__ import annotations

from quire.kernels import Ops
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.sampling.vocabulary.divided import DividedVocabulary
from quire.services.worker.sampling.vocabulary.port import Vocabulary
from quire.services.worker.sampling.vocabulary.undivided import UndividedVocabulary


def open_vocabulary(shard: Shard, vocab_size: int, ops: Ops) -> Vocabulary:
    return UndividedVocabulary(vocab_size, ops) if shard.is_whole else DividedVocabulary(shard, vocab_size, ops)
