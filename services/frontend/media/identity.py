"""Identifiers of media items: equal for equal files that are processed equally for one model, and for no others.

    identifier = SHA-256("quire/media/1" · model · mode · background · options · file)
    identifier = SHA-256("quire/media/1" · model · "video" · options · metadata · file)

Every part is preceded by its length, so that no two lists of parts have the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from quire.services.frontend.request.media import MediaOptions, VideoMetadata

DOMAIN = b"quire/media/1"
MODEL_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
LENGTH_BYTES = 8


def model_digest(folder: Path) -> bytes:
    """Returns the hash of the files of a model that say how its pictures and videos are processed."""
    files = ((folder / name) for name in MODEL_FILES)
    return _digest(file.read_bytes() if file.is_file() else b"" for file in files)


def options_key(options: MediaOptions) -> bytes:
    """Returns the options in canonical form: equal bytes for equal options, in whatever order they were given."""
    canonical = json.dumps(dict(options.processor), sort_keys=True, separators=(",", ":"))
    return json.dumps([options.image_mode, options.background, canonical]).encode()


def identifier(model: bytes, options: MediaOptions, content: bytes) -> bytes:
    """Returns the 32 bytes that identify a picture. `model`: model_digest(); `content`: the file."""
    return _digest((model, options_key(options), content))


def video_key(options: MediaOptions, metadata: VideoMetadata) -> bytes:
    """Returns the options of a video in canonical form. `metadata`: of the frames, if they were sent as such."""
    canonical = json.dumps(dict(options.video), sort_keys=True, separators=(",", ":"))
    return json.dumps(["video", canonical, metadata]).encode()


def video_identifier(model: bytes, options: MediaOptions, metadata: VideoMetadata, content: bytes) -> bytes:
    """Returns the 32 bytes that identify a video. `model`: model_digest(); `content`: the file."""
    return _digest((model, video_key(options, metadata), content))


def _digest(parts: Iterable[bytes]) -> bytes:
    hashed = hashlib.sha256(DOMAIN)
    for part in parts:
        hashed.update(len(part).to_bytes(LENGTH_BYTES, "little"))
        hashed.update(part)
    return hashed.digest()
