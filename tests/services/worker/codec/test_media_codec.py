"""Media items survive the wire; invalid ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from quire.services.worker.codec.media_codec import decode_fetched, decode_item, encode_fetched, encode_item
from quire.services.worker.codec.step_codec import decode_plan, encode_plan
from quire.services.worker.step.fetched_item import FetchedItem, FetchedRows
from quire.services.worker.step.media_items import MediaItem
from quire.shared.columns import ColumnError, u32_bytes
from quire.shared.pb.worker.v1 import worker_pb2 as pb

ITEM = MediaItem(b"i" * 32, 5, 12, 7, ((1, 3), (6, 4)), "video", (2, -1, 9))


def test_an_item_returns_from_the_wire() -> None:
    assert decode_item(encode_item(ITEM)) == ITEM
    plain = MediaItem(b"j" * 32, 0, 4, 4)
    assert decode_item(encode_item(plain)) == plain


def test_a_plan_has_the_items_of_its_admissions() -> None:
    wire = pb.StepPlan(epoch=1, step_id=1, admitted=[pb.Admission(slot=2, media=[encode_item(ITEM)])])
    plan = decode_plan(pb.StepPlan.FromString(encode_plan(decode_plan(wire)).SerializeToString()))
    assert list(plan.changes.admitted[0].media) == [ITEM]


def test_pixels_reach_the_other_ranks() -> None:
    rng = np.random.default_rng(2)
    sent = [
        FetchedItem(bytes([number]) * 32, number, tuple(range(number)), rng.integers(0, 256, shape, dtype=np.uint8))
        for number, shape in enumerate([(1, 2, 3, 3), (4, 1, 1, 3)], start=1)
    ]
    found = decode_fetched(encode_fetched(sent))
    assert [item[:3] for item in found] == [item[:3] for item in sent]
    assert all(np.array_equal(one.pixels, other.pixels) for one, other in zip(found, sent, strict=True))


def test_rows_reach_the_other_ranks() -> None:
    rows = np.arange(24, dtype=np.uint8).reshape(3, 8)
    pixels = FetchedItem(b"p" * 32, 1, (), np.ones((1, 2, 2, 3), np.uint8))
    first, second = decode_fetched(encode_fetched([FetchedRows(b"r" * 32, 3, rows), pixels]))
    assert isinstance(first, FetchedRows)
    assert first[:2] == (b"r" * 32, 3)
    assert np.array_equal(first.rows, rows)
    assert isinstance(second, FetchedItem)
    assert np.array_equal(second.pixels, pixels.pixels)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("identifier", b"short"),
        ("embedding_runs", b"123"),
        ("embedding_runs", u32_bytes([0, 1, 2])),
        ("embedding_runs", u32_bytes([0, 13])),
        ("layout", b"12345"),
        ("num_embeddings", 0),
        ("length", 0),
    ],
)
def test_invalid_items_are_refused(field: str, value: object) -> None:
    wire = encode_item(ITEM)
    setattr(wire, field, value)
    with pytest.raises(ColumnError):
        decode_item(wire)
