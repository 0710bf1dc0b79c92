"""Identity of stored blocks: their layout and every byte of the weights that computed them."""

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

FORMAT = 2  # incremented when the meaning of stored blocks changes
READ_BYTES = 8 << 20
NUM_READERS = 4


def cache_identity(layout: bytes, weights: str, **facts: object) -> tuple[bytes, Mapping[str, object]]:
    """Returns the 32-byte identity and a readable description of it. `layout`: layout digest, as exchanged between
    workers; `weights`: digest of the weights."""
    description = {"format": FORMAT, "layout": layout.hex(), "weights": weights, **facts}
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).digest(), description


def weights_digest(folder: Path, patterns: Sequence[str], memo: Path) -> str:
    """Returns the SHA-256 of the files in a model's folder that match one of `patterns`. Reading them takes about as
    long as loading, so the file `memo` caches the digests of unchanged files."""
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    if not files:  # the source of the weights is unknown: use an identity that no later process can have
        log.warning("no weight files found; KV is not kept across restarts", folder=str(folder))
        return secrets.token_hex(32)
    stamps = [_stamp(path) for path in files]
    noted = _noted(memo)
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="digest") as readers:
        digests = [*readers.map(lambda path, stamp: noted.get(stamp) or _digest(path), files, stamps)]
    try:
        temporary = memo.with_suffix(".new")
        temporary.write_text(json.dumps(dict(zip(stamps, digests, strict=True))))
        temporary.replace(memo)
    except OSError as error:
        log.warning("cannot cache the digests of the weights; the next start reads the files again", reason=error)
    whole = "".join(f"{path.name} {digest}\n" for path, digest in zip(files, digests, strict=True))
    return hashlib.sha256(whole.encode()).hexdigest()


def _stamp(path: Path) -> str:
    """Returns a string that changes whenever the file's bytes change: its ctime cannot be set back."""
    status = os.stat(path)
    return (
        f"{path.resolve()} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    )


def _digest(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal, reading it in pieces of 8 MiB."""
    found, read = hashlib.sha256(), bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(read):
            found.update(memoryview(read)[:count])
    return found.hexdigest()


def _noted(memo: Path) -> dict[str, str]:
    """Returns the cached digests by _stamp(); {} if the file is missing or invalid."""
    try:
        noted = json.loads(memo.read_text())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}
