"""Encoding keeps rows by item, each in memory of its own; an item that fails does so alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.services.worker.media.encoder_cache import EncoderCache
from quire.services.worker.models.vision.port import MediaInput
from quire.services.worker.replica.media_encoding import MediaEncoding, RowType
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.errors import Internal, InvalidArgument, QuireError, ResourceExhausted

NUM_ROWS, WIDTH = 4, 6


class MeanEncoder:
    """An encoder whose rows hold the mean of the pixels; all rows of a call are parts of one tensor."""

    def __init__(self, refused: int = -1, error: Exception | None = None) -> None:
        """`refused`: value of the first pixel for which `error` is raised."""
        self._refused, self._error = refused, error
        self.calls: list[int] = []

    def encode(self, items: Sequence[MediaInput]) -> list[torch.Tensor]:
        self.calls.append(len(items))
        if self._error is not None and any(int(item.pixels.flatten()[0]) == self._refused for item in items):
            raise self._error
        means = torch.stack([item.pixels.float().mean() for item in items])
        return list(means[:, None, None].expand(-1, NUM_ROWS, WIDTH).contiguous().unbind(0))


def item(value: int, num_embeddings: int = NUM_ROWS) -> FetchedItem:
    return FetchedItem(bytes([value]) * 32, num_embeddings, (), np.full((1, 2, 2, 3), value, dtype=np.uint8))


def encoding(encoder: MeanEncoder, capacity: int = 100, scale: float = 1.0) -> tuple[MediaEncoding, EncoderCache]:
    cache = EncoderCache(capacity)
    row_type = RowType(torch.float32, WIDTH)
    media = MediaEncoding(encoder, cache, torch.device("cpu"), ("image",), row_type=row_type, scale=scale)  # type: ignore[arg-type]
    return media, cache


def kinds(errors: Sequence[QuireError | None]) -> list[type | None]:
    return [None if error is None else type(error) for error in errors]


def test_items_of_one_call_have_memory_of_their_own() -> None:
    """Releasing one of them frees its rows."""
    media, cache = encoding(MeanEncoder(), scale=2.0)
    batch = media.encode([item(value) for value in (1, 2, 3)])
    batch.wait()
    assert batch.errors == (None, None, None)
    for value in (1, 2, 3):
        rows = cache.rows(bytes([value]) * 32)
        assert rows.untyped_storage().nbytes() == rows.nbytes == NUM_ROWS * WIDTH * 4
        assert bool((rows == 2.0 * value).all())
    media.release(bytes([2]) * 32)
    assert (media.num_items, media.num_rows) == (2, 2 * NUM_ROWS)


def test_an_item_that_cannot_be_encoded_fails_alone() -> None:
    for error, kind in [
        (InvalidArgument("wrong size", field="media"), InvalidArgument),
        (RuntimeError("shapes"), Internal),
        (torch.OutOfMemoryError("full"), ResourceExhausted),
    ]:
        encoder = MeanEncoder(2, error)
        media, _ = encoding(encoder)
        batch = media.encode([item(value) for value in (1, 2, 3)])
        assert kinds(batch.errors) == [None, kind, None]
        assert encoder.calls == [3, 1, 1, 1]
        assert media.num_items == 2


def test_other_numbers_of_rows_and_a_full_cache_are_errors_of_the_item() -> None:
    media, _ = encoding(MeanEncoder(), capacity=NUM_ROWS)
    batch = media.encode([item(1, NUM_ROWS + 1), item(2), item(3)])
    assert kinds(batch.errors) == [InvalidArgument, None, ResourceExhausted]


def test_read_only_pixels_are_encoded() -> None:
    """Of a store, or of a message to another rank."""
    media, _ = encoding(MeanEncoder())
    pixels = np.frombuffer(bytes(12), dtype=np.uint8).reshape(1, 2, 2, 3)
    assert media.encode([FetchedItem(b"r" * 32, NUM_ROWS, (), pixels)]).errors == (None,)


def test_the_end_of_an_attachment_releases_all_rows() -> None:
    media, _ = encoding(MeanEncoder())
    media.encode([item(1)])
    report = RetainedState([], b"")
    assert media.end_epoch(report) is report
    assert (media.num_items, media.num_rows) == (0, 0)
