"""Digest of what the bytes of a block mean: workers with equal digests can exchange blocks.

Weights are identified by samples of their files (weight_samples.py)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from quire.shared.models.model_identity import fingerprint, read_config


def layout_of(folder: Path, samples: bytes, **facts: object) -> bytes:
    """Returns the 32-byte layout digest. `samples`: digest of the folder's weights; `facts`: how the worker computes
    and stores KV, equal where KV can be exchanged."""
    all_facts = {**facts, "config": fingerprint(read_config(folder)), "weights": samples.hex()}
    return hashlib.sha256(json.dumps(all_facts, sort_keys=True, default=str).encode()).digest()


def with_version(layout: bytes, weight_version: str) -> bytes:
    """Returns the layout digest for weights that may have been updated since they were loaded."""
    return hashlib.sha256(layout + weight_version.encode()).digest()
