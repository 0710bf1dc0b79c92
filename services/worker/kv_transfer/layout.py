"""What the bytes of a block mean, in 32 bytes: workers with the same can read each other's blocks.

Weights are facts_json apart by samples of their files (weight_samples.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from quire.shared.models.model_identity import fingerprint, read_config


def layout_of(folder: Path, samples: bytes, **facts: object) -> bytes:
    """`samples`: of the folder's weights; `facts`: of how the worker computes and keeps KV; equal where KV can be
    exchanged."""
    facts_json = {**facts, "config": fingerprint(read_config(folder)), "weights": samples.hex()}
    return hashlib.sha256(json.dumps(facts_json, sort_keys=True, default=str).encode()).digest()


def with_version(layout: bytes, weight_version: str) -> bytes:
    """Of weights that may have changed since they were loaded."""
    return hashlib.sha256(layout + weight_version.encode()).digest()
