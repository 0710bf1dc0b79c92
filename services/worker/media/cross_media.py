"""Output of an encoder as what a decoder attends to (encoder-decoder models)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.services.worker.media.step_media import NoStepMedia
from quire.services.worker.step.media_items import MediaItem
from quire.services.worker.step.plan_violation import require
from quire.shared.columns import I32, U32

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.media.encoder_cache import EncoderCache

StoreRows = Callable[["Tensor", I32], None]  # of rows and the blocks that get their keys and values


class CrossMedia(NoStepMedia):
    """Writes the keys and values of encoder outputs into KV blocks. Rows stand at no position of a sequence."""

    def __init__(self, cache: EncoderCache, store: StoreRows) -> None:
        self._cache, self._store = cache, store

    def admit(self, slot: int, items: Sequence[MediaItem], num_computed: int) -> None:
        """Does nothing: the slot table has the blocks of the item."""

    def write(self, item: MediaItem, block_ids: U32) -> None:
        """Writes the keys and values of the item's rows into blocks. Raises PlanViolation if the rows are not kept."""
        require(item.identifier in self._cache, lambda: "writes_cross: the rows of the item are not kept")
        self._store(self._cache.rows(item.identifier), block_ids.astype(np.int32))
