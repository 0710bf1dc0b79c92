"""Mapping of digests to adapters, and their text in block hashes."""

from __future__ import annotations

import pytest

from quire.shared.kv import block_hash
from quire.shared.models import adapter_ids

DIGESTS = b"x" * 32 + b"y" * 32


def test_each_adapter_has_its_digest() -> None:
    assert adapter_ids.digests_by_name(["a", "b"], DIGESTS) == {"a": b"x" * 32, "b": b"y" * 32}
    assert adapter_ids.digests_by_name(["a", "b"], b"") == {"a": b"", "b": b""}
    with pytest.raises(ValueError, match="64 bytes of digests for 1 adapters"):
        adapter_ids.digests_by_name(["a"], DIGESTS)


def test_what_one_content_computed_is_not_found_by_another() -> None:
    texts = [adapter_ids.hash_text("a", digest) for digest in (b"", b"x" * 32, b"y" * 32)]
    assert len({block_hash.root_hash(text) for text in texts}) == 3
