"""Layers with several caches: each in pages of its group, though they share memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.services.worker.attention.port import AttentionMetadata
from quire.services.worker.kv import kv_cache
from quire.services.worker.kv.kv_memory import BlockShape
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.limits.kv_layout import KVLayout
from quire.services.worker.step.block_copies import BlockCopies
from quire.shared.errors import InvalidArgument
from quire.shared.kv.kv_specs import FULL, KVSpec, LayerSpec, State, Window

LAYERS: list[LayerSpec] = [(FULL, State(64)), FULL, (FULL, State(64)), FULL]  # groups: full, full, state
SHAPE = BlockShape(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def test_each_thing_has_a_place_of_its_own() -> None:
    layout = KVLayout.of(LAYERS, 100)
    assert layout.places == (((0, 0), (2, 0)), ((0, 1),), ((1, 0), (2, 1)), ((1, 1),))
    assert layout.for_layers(range(2, 4)).places == (((1, 0), (2, 0)), ((1, 1),))


def test_a_layer_reads_the_tables_of_all_its_groups() -> None:
    layout, memory = KVLayout.of(LAYERS, 100), kv_cache.allocate(SHAPE, 5, torch.device("cpu"))
    caches = kv_cache.caches_by_layer(memory, layout)
    tables = [torch.full((1, 3), group, dtype=torch.int32) for group in range(3)]
    column = torch.zeros(1, dtype=torch.int32)
    metadata = AttentionMetadata(tables[0], column, column, max_query_len=1, max_seq_len=1)
    batch = ForwardBatch(column, column, column, metadata, None).with_groups(tables[1:], [column, column])
    read = [batch.for_cache(cache) for cache in caches]
    assert [int(one.attention.block_tables[0, 0]) for one in read] == [0, 0, 1, 1]
    besides = [None if one.second is None else int(one.second.attention.block_tables[0, 0]) for one in read]
    assert besides == [2, None, 2, None]
    assert [cache.last_group for cache in caches] == [2, 0, 2, 1]


def test_copied_block_is_complete_for_every_group() -> None:
    """Includes the last place, the state of a layer with two caches."""
    layout = KVLayout.of([State(64), *[(FULL, State(64))] * 8], 100)
    assert layout.places[-1] == ((0, 7), (1, 8))
    memory = kv_cache.allocate(replace(SHAPE, num_layers=9), 5, torch.device("cpu"))
    for cache in memory:
        for part in cache.parts:
            part[3] = 7.0
    kv_cache.copy_blocks(kv_cache.caches_by_layer(memory, layout), BlockCopies(np.array([3]), np.array([1])))
    assert all(bool((part[1] == 7.0).all()) for cache in memory for part in cache.parts)


@pytest.mark.parametrize("specs", [(FULL, FULL), (Window(200), FULL)])
def test_duplicate_spec_of_a_layer_is_refused(specs: tuple[KVSpec, ...]) -> None:
    with pytest.raises(InvalidArgument, match="layer 1 needs full, full; each spec may occur once"):
        KVLayout.of([FULL, specs], 100)
