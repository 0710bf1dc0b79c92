"""Identifiers of media items: equal for equal files that are processed equally for one model, and for no others.

    identifier = SHA-256("quire/media/1" · model · processing · file)

`processing` is options_key(): the modality, and those options of the request that items of this modality depend on.

Every part is preceded by its length, so that no two lists of parts have the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from quire.services.frontend.request.media import NO_METADATA, MediaOptions, VideoMetadata
from quire.shared.media.modalities import AUDIO, IMAGE, TEXT, VIDEO

DOMAIN = b"quire/media/1"
MODEL_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
LENGTH_BYTES = 8


def model_digest(folder: Path) -> bytes:
    """Returns the hash of the files of a model that say how its media are processed."""
    files = ((folder / name) for name in MODEL_FILES)
    return _digest(file.read_bytes() if file.is_file() else b"" for file in files)


def options_key(options: MediaOptions, modality: str = IMAGE, metadata: VideoMetadata = NO_METADATA) -> bytes:
    """Returns the options of an item in canonical form: equal bytes for equal options, in whatever order they were
    given. `metadata`: of a video that was sent as frames."""
    given = options.video if modality == VIDEO else options.processor
    canonical = json.dumps(dict(given), sort_keys=True, separators=(",", ":"))
    further = {IMAGE: (options.image_mode, options.background), VIDEO: metadata, AUDIO: ()}
    return json.dumps([modality, canonical, further[modality]]).encode()


def identifier(
    model: bytes,
    options: MediaOptions,
    content: bytes,
    modality: str = IMAGE,
    metadata: VideoMetadata = NO_METADATA,
) -> bytes:
    """Returns the 32 bytes that identify an item. `model`: model_digest(); `content`: the file; `metadata`: of a video
    that was sent as frames."""
    return _digest((model, options_key(options, modality, metadata), content))


def prompt_identifier(model: bytes, token_ids: bytes) -> bytes:
    """Returns the 32 bytes that identify an encoder prompt. `model`: model_digest(); `token_ids`: a column."""
    return _digest((model, TEXT.encode(), token_ids))


def _digest(parts: Iterable[bytes]) -> bytes:
    hashed = hashlib.sha256(DOMAIN)
    for part in parts:
        hashed.update(len(part).to_bytes(LENGTH_BYTES, "little"))
        hashed.update(part)
    return hashed.digest()
