"""Adapters are told apart by what they compute: two of one name may be different ones, before and after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DIGEST_BYTES = 32


class AdapterId(NamedTuple):
    """Of one content."""

    name: str
    digest: bytes  # SHA-256 of what it computes; empty where nobody has said it


def digests_by_name(names: Sequence[str], digests: bytes) -> dict[str, bytes]:
    """`digests`: of DIGEST_BYTES each, in the order of `names`; empty where nobody has said them. Raises ValueError
    for another number of bytes."""
    if not digests:
        return dict.fromkeys(names, b"")
    if len(digests) != DIGEST_BYTES * len(names):
        raise ValueError(f"{len(digests)} bytes of digests for {len(names)} adapters")
    return {name: digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i, name in enumerate(names)}


def ids(names: Sequence[str], digests: bytes) -> list[AdapterId]:
    """In their order; as digests_by_name()."""
    parts = [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
    return [AdapterId(*pair) for pair in zip(names, parts or [b""] * len(names), strict=True)]


def hash_text(name: str, digest: bytes) -> str:
    """What stands for the adapter in the root of a block hash."""
    return f"{name}\n{digest.hex()}" if digest else name
