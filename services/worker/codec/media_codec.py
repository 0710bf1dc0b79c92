"""Conversion of media items and their pixels between plain values and bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from quire.services.worker.step.fetched_item import Fetched, FetchedItem, FetchedRows
from quire.services.worker.step.media_items import MediaItem
from quire.shared.columns import ColumnError, i32, i32_bytes, u32, u32_bytes
from quire.shared.kv.block_hash import HASH_BYTES
from quire.shared.media.processor import TileLayout
from quire.shared.pb.common.v1 import media_pb2

# Of a fetched item: identifier, rows, tiles, height, width, length of the layout, whether it is sound; the layout and
# the pixels follow. Of fetched rows: 0 tiles, and the bytes of a row in place of the height; the rows follow.
FETCHED = struct.Struct(f"<{HASH_BYTES}s5I?")


def decode_item(wire: media_pb2.MediaItem) -> MediaItem:
    """Decodes an item. Raises ColumnError for invalid columns, identifiers and runs."""
    runs = u32(wire.embedding_runs).tolist()
    if len(wire.identifier) != HASH_BYTES or len(runs) % 2:
        raise ColumnError(f"media item: {len(wire.identifier)} bytes of an identifier, {len(runs)} numbers of runs")
    pairs = tuple(zip(runs[::2], runs[1::2], strict=True))
    layout = tuple(i32(wire.layout).tolist())
    sizes = wire.offset, wire.length, wire.num_embeddings
    try:
        return MediaItem(wire.identifier, *sizes, pairs, wire.modality, layout, wire.is_attended)
    except ValueError as error:
        raise ColumnError(f"media item: {error}") from None


def encode_item(item: MediaItem) -> media_pb2.MediaItem:
    """Encodes an item, as the inverse of decode_item()."""
    return media_pb2.MediaItem(
        identifier=item.identifier,
        offset=item.offset,
        length=item.length,
        num_embeddings=item.num_embeddings,
        embedding_runs=u32_bytes([number for run in item.runs for number in run]),
        modality=item.modality,
        layout=i32_bytes(list(item.layout)),
        is_attended=item.is_attended,
    )


def encode_fetched(items: Sequence[Fetched]) -> bytes:
    """Encodes items with their pixels or rows, for the other ranks of a replica."""
    parts = []
    for item in items:
        if isinstance(item, FetchedRows):
            parts += [FETCHED.pack(item.identifier, item.num_embeddings, 0, item.rows.shape[1], 0, 0, False)]
            parts += [item.rows.tobytes()]
            continue
        size, is_sound = item.pixels.shape[:3], item.pixels.dtype != np.uint8
        parts.append(FETCHED.pack(item.identifier, item.num_embeddings, *size, len(item.layout), is_sound))
        parts += [i32_bytes(list(item.layout)), item.pixels.tobytes()]
    return b"".join(parts)


def decode_fetched(data: bytes) -> list[Fetched]:
    """Decodes the items of encode_fetched(); their pixels and rows are read-only views."""
    items: list[Fetched] = []
    at = 0
    while at < len(data):
        identifier, num_embeddings, tiles, height, width, num_numbers, is_sound = FETCHED.unpack_from(data, at)
        at += FETCHED.size
        if not tiles:
            size = num_embeddings * height
            rows = np.frombuffer(data, "u1", size, at).reshape(num_embeddings, height)
            items.append(FetchedRows(identifier, num_embeddings, rows))
            at += size
            continue
        numbers = tuple(np.frombuffer(data, "<i4", num_numbers, at).tolist())
        at += 4 * num_numbers
        layout = TileLayout(tiles, height, width, numbers, is_sound)
        pixels = np.frombuffer(data, layout.dtype, math.prod(layout.shape), at).reshape(layout.shape)
        items.append(FetchedItem(identifier, num_embeddings, numbers, pixels))
        at += layout.num_bytes
    return items
