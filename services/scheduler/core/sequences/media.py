"""Media items of a prompt: pictures whose rows of embeddings stand in the place of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class MediaItem(NamedTuple):
    """One item of one prompt."""

    identifier: bytes  # 32 bytes: hash of the content and of its processing; equal items have the same
    offset: int  # position in the prompt of its first token
    length: int  # tokens in its place, text in between included
    num_embeddings: int  # rows that the encoder computes for it
    payload: object = None  # what the worker needs to get and encode it; not read by the core

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.offset + self.length


def item_around(items: Iterable[MediaItem], position: int) -> MediaItem | None:
    """Returns the item that has tokens both before `position` and from it on; None if there is none."""
    return next((item for item in items if item.offset < position < item.end), None)


def first_start(items: Iterable[MediaItem], begin: int, end: int) -> int:
    """Returns the position of the first item that starts in [begin, end); `end` if none does."""
    return min((item.offset for item in items if begin <= item.offset < end), default=end)
