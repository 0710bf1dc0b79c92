"""Pixels of a media item as workers get them."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.shared.media.processor import TileLayout


@dataclass(frozen=True, slots=True)
class MediaTiles:
    """Rendered tiles of one item: 8-bit RGB, [num_tiles, height, width, 3]; of sound: float32 features; of an
    encoder prompt: its token ids as float32, [1, 1, num_tokens]."""

    layout: TileLayout
    pixels: bytes = field(repr=False)
