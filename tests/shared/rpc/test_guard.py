"""Parsing of a call's metadata for authentication."""

from __future__ import annotations

from quire.shared.rpc.guard import metadata_of


def test_who_shows_two_keys_shows_none() -> None:
    assert metadata_of(None) == {}
    assert metadata_of((("x-api-key", "a"), ("other", "1"))) == {"x-api-key": "a", "other": "1"}
    sent = (("authorization", "a"), ("other", "1"), ("authorization", "a"), ("other", "2"), ("x-api-key", "b"))
    assert metadata_of(sent) == {"authorization": "", "other": "2", "x-api-key": "b"}
