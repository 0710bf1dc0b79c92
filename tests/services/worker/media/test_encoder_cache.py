"""The encoder cache counts the rows that it keeps."""

from __future__ import annotations

import random

import pytest
import torch

from quire.services.worker.media.encoder_cache import EncoderCache
from quire.shared.errors import ResourceExhausted


def test_random_operations_keep_the_count() -> None:
    chance = random.Random(3)
    cache, kept = EncoderCache(40), dict[bytes, int]()
    for _ in range(2000):
        identifier = bytes([chance.randrange(12)]) * 32
        if chance.random() < 0.4:
            cache.release(identifier)
            kept.pop(identifier, None)
        elif chance.random() < 0.02:
            cache.clear()
            kept.clear()
        else:
            rows = chance.randint(1, 15)
            room = cache.capacity - sum(count for key, count in kept.items() if key != identifier)
            if rows <= room:
                cache.keep(identifier, torch.zeros(rows, 2))
                kept[identifier] = rows
            else:
                kept.pop(identifier, None)  # its earlier rows gave way
                with pytest.raises(ResourceExhausted, match=f"an item has {rows}"):
                    cache.keep(identifier, torch.zeros(rows, 2))
        assert (cache.num_rows, len(cache)) == (sum(kept.values()), len(kept))
        assert all(cache.rows(key).size(0) == count for key, count in kept.items())
