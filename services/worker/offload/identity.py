"""What the bytes of a block mean for as long as they are kept: its layout, and the weights, every byte of them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.shared.logs import logger

log = logger("worker.offload")

FORMAT = 2  # raised when blocks come to mean something else
READ_BYTES = 8 << 20
NUM_READERS = 4


def cache_identity(layout: bytes, weights: str, **facts: object) -> tuple[bytes, Mapping[str, object]]:
    """In 32 bytes, and for people. `layout`: as workers tell each other; `weights`: their digest."""
    facts_json = {"format": FORMAT, "layout": layout.hex(), "weights": weights, **facts}
    return hashlib.sha256(json.dumps(facts_json, sort_keys=True, default=str).encode()).digest(), facts_json


def weights_digest(folder: Path, patterns: Sequence[str], memo: Path) -> str:
    """Returns the SHA-256 of the files in a model's folder that match one of `patterns`. Reading them takes about as
    long as loading them does, so what was found is noted in the file `memo`, for files that have not changed since."""
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    if not files:  # whatever the model is read from is unknown here: no later life finds what this one keeps
        log.warning("no files of weights are known: KV is not kept over restarts", folder=str(folder))
        return secrets.token_hex(32)
    stamps = [_stamp(path) for path in files]
    noted = _noted(memo)
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="digest") as readers:
        digests = [*readers.map(lambda path, stamp: noted.get(stamp) or _digest(path), files, stamps)]
    try:
        beside = memo.with_suffix(".new")
        beside.write_text(json.dumps(dict(zip(stamps, digests, strict=True))))
        beside.replace(memo)
    except OSError as error:
        log.warning("the digest of the weights is not noted: they are read again at the next start", reason=error)
    whole = "".join(f"{path.name} {digest}\n" for path, digest in zip(files, digests, strict=True))
    return hashlib.sha256(whole.encode()).hexdigest()


def _stamp(path: Path) -> str:
    """Another one whenever the file's bytes have changed: its ctime cannot be set back."""
    status = os.stat(path)
    return (
        f"{path.resolve()} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    )


def _digest(path: Path) -> str:
    found, read = hashlib.sha256(), bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(read):
            found.update(memoryview(read)[:count])
    return found.hexdigest()


def _noted(memo: Path) -> dict[str, str]:
    try:
        noted = json.loads(memo.read_text())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}
