"""Expansion of the placeholders in tokenized prompts: each becomes the tokens of its item, some of whose embeddings are
replaced by the encoder's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.services.frontend.media.tiles import MediaTiles
from quire.shared.columns import i32_bytes, u32_bytes
from quire.shared.errors import InvalidArgument
from quire.shared.media.expansion import ExpandedItem, Join, expand_each, over_the_prompt
from quire.shared.media.modalities import IMAGE
from quire.shared.media.processor import PlaceholderExpansion
from quire.shared.pb.common.v1 import media_pb2


class PlacedItem(NamedTuple):
    """Item whose placeholder is to be replaced."""

    identifier: bytes
    tiles: MediaTiles
    expansion: PlaceholderExpansion
    placeholder: int
    modality: str = IMAGE


def check_count(num_placeholders: int, num_items: int, placeholder: str, field: str, modality: str = IMAGE) -> None:
    """Raises InvalidArgument unless a prompt has as many placeholders as items. `field`: of the items."""
    if num_placeholders > num_items:
        raise InvalidArgument(
            f"Found more '{placeholder}' placeholders in input prompt than actual multimodal data items. "
            f"Placeholders: {num_placeholders}, items: {num_items}; write the placeholder once for each item.",
            field=field,
        )
    if num_placeholders < num_items:
        raise InvalidArgument(
            f"Expected there to be {num_items} prompt updates corresponding to {num_items} {modality} items, but "
            f"instead found {num_placeholders} prompt updates! This is likely because you forgot to include input "
            f"placeholder tokens (here: `{placeholder}`) in the prompt. If the model has a chat template, make sure "
            "you have applied it.",
            field=field,
        )


def expand(
    token_ids: Sequence[int], items: Sequence[PlacedItem], join: Join | None = None, *, covers_prompt: bool = False
) -> tuple[list[int], tuple[media_pb2.MediaItem, ...]]:
    """Returns the tokens with each placeholder replaced by the expansion of its item, and the items with their offsets.
    Items are in the order of their placeholders. `join`: see shared/media/expansion.py; `covers_prompt`: the only item
    is the whole prompt."""
    prompt = expand_each(token_ids, [(item.placeholder, item.expansion) for item in items], join)
    if covers_prompt:
        prompt = over_the_prompt(prompt)
    return prompt.token_ids, tuple(_message(*each) for each in zip(items, prompt.items, strict=True))


def attended(item: PlacedItem) -> media_pb2.MediaItem:
    """Returns an item to whose rows the decoder attends, as schedulers and workers get it. It is part of the hashes of
    all blocks, as its range is the first token."""
    return media_pb2.MediaItem(
        identifier=item.identifier,
        length=1,
        num_embeddings=item.expansion.num_embeddings,
        modality=item.modality,
        layout=i32_bytes(item.tiles.layout.numbers),
        is_attended=True,
    )


def _message(item: PlacedItem, place: ExpandedItem) -> media_pb2.MediaItem:
    """Returns the item as schedulers and workers get it."""
    runs = [number for run in place.runs for number in run]
    return media_pb2.MediaItem(
        identifier=item.identifier,
        offset=place.offset,
        length=place.length,
        num_embeddings=item.expansion.num_embeddings,
        embedding_runs=b"" if runs == [0, place.length] else u32_bytes(runs),
        modality=item.modality,
        layout=i32_bytes(item.tiles.layout.numbers),
    )
