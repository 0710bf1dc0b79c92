"""Identity of LoRA adapters by name and content: two adapters of one name may differ, for instance before and after
a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DIGEST_BYTES = 32


class AdapterId(NamedTuple):
    """Name and content of an adapter; equal ids mean equal weights, as far as digests are reported."""

    name: str
    digest: bytes  # SHA-256 of the weights; empty: not reported


def digests_by_name(names: Sequence[str], digests: bytes) -> dict[str, bytes]:
    """Returns digests by name. `digests`: DIGEST_BYTES each, in the order of `names`; empty: not reported. Raises
    ValueError for another number of bytes."""
    if not digests:
        return dict.fromkeys(names, b"")
    if len(digests) != DIGEST_BYTES * len(names):
        raise ValueError(f"{len(digests)} bytes of digests for {len(names)} adapters")
    return {name: digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i, name in enumerate(names)}


def ids(names: Sequence[str], digests: bytes) -> list[AdapterId]:
    """Returns adapter ids in the order of `names`; arguments as for digests_by_name()."""
    parts = [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]
    return [AdapterId(*pair) for pair in zip(names, parts or [b""] * len(names), strict=True)]


def hash_text(name: str, digest: bytes) -> str:
    """Returns the text that stands for the adapter in the root of the block hash chain."""
    return f"{name}\n{digest.hex()}" if digest else name
