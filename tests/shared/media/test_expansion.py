"""Expansions take the places of placeholders; tokens at their borders may be joined with the text around."""

from __future__ import annotations

from quire.shared.media.expansion import ExpandedItem, expand_placeholders
from quire.shared.media.processor import PlaceholderExpansion

PLACEHOLDER = 50
PICTURE = PlaceholderExpansion((2, 60, 61, 61, 62, 2), ((2, 2),))


def joined(left: int, right: int) -> int | None:
    """Tokens below 10 are as many line feeds."""
    return left + right if left < 10 and right < 10 else None


def test_text_around_pictures_stays() -> None:
    found = expand_placeholders([20, 50, 1, 50], PLACEHOLDER, [PICTURE, PICTURE])
    assert found.token_ids == [20, *PICTURE.token_ids, 1, *PICTURE.token_ids]
    assert found.items == [ExpandedItem(1, 6, ((2, 2),)), ExpandedItem(8, 6, ((2, 2),))]


def test_placeholders_beyond_the_expansions_stay() -> None:
    assert expand_placeholders([50, 50], PLACEHOLDER, [PICTURE]).token_ids == [*PICTURE.token_ids, 50]
    assert expand_placeholders([1, 2], PLACEHOLDER, [], joined).token_ids == [1, 2], "text alone is as tokenized"


def test_joined_tokens_belong_to_no_picture() -> None:
    found = expand_placeholders([20, 1, 50, 3, 20], PLACEHOLDER, [PICTURE], joined)
    assert found.token_ids == [20, 3, 60, 61, 61, 62, 5, 20]
    assert found.items == [ExpandedItem(2, 4, ((1, 2),))]


def test_neighbouring_pictures_share_the_token_between_them() -> None:
    found = expand_placeholders([50, 50, 50], PLACEHOLDER, [PICTURE] * 3, joined)
    assert found.token_ids == [2, 60, 61, 61, 62, 4, 60, 61, 61, 62, 4, 60, 61, 61, 62, 2]
    assert found.items == [ExpandedItem(0, 5, ((2, 2),)), ExpandedItem(6, 4, ((1, 2),)), ExpandedItem(11, 5, ((1, 2),))]


def test_one_token_of_text_joins_pictures_on_both_sides() -> None:
    found = expand_placeholders([50, 1, 50], PLACEHOLDER, [PICTURE] * 2, joined)
    assert found.token_ids == [2, 60, 61, 61, 62, 5, 60, 61, 61, 62, 2]
    assert found.items == [ExpandedItem(0, 5, ((2, 2),)), ExpandedItem(6, 5, ((1, 2),))]
