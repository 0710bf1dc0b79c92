"""A submission's media items lie in order inside the prompt, and their runs add up; all else is refused by field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.services.scheduler.frontends.media_checks import MAX_ITEMS, wrong_media
from quire.shared.columns import u32_bytes
from quire.shared.pb.common.v1.media_pb2 import MediaItem

PROMPT = 100


def item(offset: int = 10, length: int = 20, **fields: Any) -> MediaItem:
    values: dict[str, Any] = {"identifier": b"i" * 32, "num_embeddings": length, "modality": "image"}
    return MediaItem(offset=offset, length=length, **{**values, **fields})


def test_items_one_behind_the_other_are_valid() -> None:
    runs = u32_bytes([1, 5, 7, 5])
    assert wrong_media([item(0, 10), item(10, 20), item(30, 12, num_embeddings=10, embedding_runs=runs)], PROMPT) == ""
    assert wrong_media([item(0, PROMPT)], PROMPT) == ""


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([item(identifier=b"short")], "identifier has 5 bytes"),
        ([item(modality="smell")], "modality 'smell'"),
        ([item(num_embeddings=0)], "num_embeddings is 0"),
        ([item(length=0, num_embeddings=0)], "num_embeddings is 0, of 0"),
        ([item(num_embeddings=21)], "num_embeddings is 21, of 20"),
        ([item(num_embeddings=19)], "embedding_runs is empty"),
        ([item(layout=b"abc")], "layout has 3 bytes"),
        ([item(layout=bytes(1 << 17))], "layout has 131072 bytes"),
        ([item(num_embeddings=2, embedding_runs=b"1234")], "no pairs of u32"),
        ([item(num_embeddings=2, embedding_runs=u32_bytes([3, 1, 3, 1]))], "a run of 1 at 3"),
        ([item(num_embeddings=2, embedding_runs=u32_bytes([3, 0]))], "a run of 0 at 3"),
        ([item(num_embeddings=2, embedding_runs=u32_bytes([19, 2]))], "up to 21"),
        ([item(num_embeddings=3, embedding_runs=u32_bytes([1, 2]))], "2 positions up to 3, for 3 rows"),
        ([item(num_embeddings=1, embedding_runs=u32_bytes([2**32 - 1, 1]))], "up to 4294967296"),
        ([item(90, 20)], "ends at 110, the prompt has 100"),
        ([item(2**32 - 1, 20)], "ends at 4294967315"),
        ([item(0, 20), item(19, 5)], r"media\[1\]: offset 19"),
        ([item(50, 5), item(10, 5)], r"media\[1\]: offset 10"),
    ],
)
def test_what_does_not_add_up_is_refused_by_field(items: list[MediaItem], text: str) -> None:
    assert re.search(text, wrong_media(items, PROMPT))


def test_the_number_of_items_is_bounded() -> None:
    items = [item(i, 1) for i in range(MAX_ITEMS + 1)]
    assert f"media[{MAX_ITEMS}]: more than {MAX_ITEMS} items" == wrong_media(items, 5000)
