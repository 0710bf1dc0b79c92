"""Validates the media items of a submission: their places in the prompt, and what the encoder computes for them."""

from __future__ import annotations

from collections.abc import Iterable

from quire.shared.columns import u32
from quire.shared.kv import block_hash
from quire.shared.media.modalities import MODALITIES, TEXT
from quire.shared.pb.common.v1.media_pb2 import MediaItem

MAX_ITEMS = 1024  # of one prompt
MAX_ROWS = 2**24  # that a decoder attends to
MAX_LAYOUT = 2**16  # bytes of MediaItem.layout


def wrong_media(items: Iterable[MediaItem], num_prompt_tokens: int) -> str:
    """Returns what is wrong with the media items of a prompt, naming the field; empty if nothing is."""
    end = 0
    for index, item in enumerate(items):
        problem = _wrong_item(item) if index < MAX_ITEMS else f"more than {MAX_ITEMS} items"
        if not problem and item.offset < end:
            problem = f"offset {item.offset} is inside or before the item in front of it, which ends at {end}"
        end = item.offset + item.length
        if not problem and end > num_prompt_tokens:
            problem = f"it ends at {end}, the prompt has {num_prompt_tokens} tokens"
        if problem:
            return f"media[{index}]: {problem}"
    return ""


def _wrong_item(item: MediaItem) -> str:
    """Returns what is wrong with one item by itself; empty if nothing is."""
    if len(item.identifier) != block_hash.HASH_BYTES:
        return f"identifier has {len(item.identifier)} bytes instead of {block_hash.HASH_BYTES}"
    if item.modality not in MODALITIES and not (item.is_attended and item.modality == TEXT):
        return f"modality {item.modality[:100]!r} is none of {', '.join(MODALITIES)}"
    if item.is_attended:
        return _wrong_attended(item)
    if not 1 <= item.num_embeddings <= item.length:
        return f"num_embeddings is {item.num_embeddings}, of {item.length} tokens"
    if len(item.layout) > MAX_LAYOUT or len(item.layout) % block_hash.TOKEN_BYTES:
        return f"layout has {len(item.layout)} bytes, which are no i32 column of at most {MAX_LAYOUT} bytes"
    return _wrong_runs(item)


def _wrong_attended(item: MediaItem) -> str:
    """Returns what is wrong with an item that a decoder attends to; empty if nothing is."""
    if (item.offset, item.length) != (0, 1) or item.embedding_runs:
        return f"is_attended: its range is {item.length} tokens at {item.offset}, not the first one without runs"
    if not 1 <= item.num_embeddings <= MAX_ROWS:
        return f"num_embeddings is {item.num_embeddings}, of at most {MAX_ROWS} rows to attend to"
    if len(item.layout) > MAX_LAYOUT or len(item.layout) % block_hash.TOKEN_BYTES:
        return f"layout has {len(item.layout)} bytes, which are no i32 column of at most {MAX_LAYOUT} bytes"
    return ""


def _wrong_runs(item: MediaItem) -> str:
    """Returns what is wrong with the runs of an item; empty if nothing is."""
    if not item.embedding_runs:
        every = item.num_embeddings == item.length
        return "" if every else f"embedding_runs is empty, and num_embeddings {item.num_embeddings} not {item.length}"
    if len(item.embedding_runs) % (2 * block_hash.TOKEN_BYTES) or len(item.embedding_runs) > MAX_LAYOUT:
        return f"embedding_runs has {len(item.embedding_runs)} bytes, which are no pairs of u32"
    end = total = 0
    for start, length in u32(item.embedding_runs).reshape(-1, 2).tolist():
        if start < end or length < 1:
            return f"embedding_runs: a run of {length} at {start} is empty or begins before {end}"
        end, total = start + length, total + length
    if end > item.length or total != item.num_embeddings:
        return f"embedding_runs: {total} positions up to {end}, for {item.num_embeddings} rows in {item.length} tokens"
    return ""
