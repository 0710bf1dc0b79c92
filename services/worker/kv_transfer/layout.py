"""What the bytes of a block mean, in 32 bytes: workers with the same can read each other's blocks.

Weights are told apart by samples of their files: it takes milliseconds, and a checkpoint that was trained on, quantized
or edited differs in nearly every page.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from shared.models.model_identity import fingerprint, read_config

NUM_SAMPLES = 64  # of a file
SAMPLE_BYTES = 4096
HEAD_BYTES = 1 << 20  # all of a small one


def layout_of(folder: Path, **facts: object) -> bytes:
    """`facts`: of how the worker computes and keeps KV; equal where KV can be exchanged."""
    told = {**facts, "config": fingerprint(read_config(folder)), "weights": [*_weights(folder)]}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).digest()


def with_version(layout: bytes, weight_version: str) -> bytes:
    """Of weights that may have changed since they were loaded."""
    return hashlib.sha256(layout + weight_version.encode()).digest()


def _weights(folder: Path) -> Iterator[tuple[str, int, str]]:
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")])
    for path in files:
        size, digest = path.stat().st_size, hashlib.sha256()
        with path.open("rb") as file:
            digest.update(file.read(HEAD_BYTES))
            for sample in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
        yield path.name, size, digest.hexdigest()
