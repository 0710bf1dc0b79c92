"""Processors of pictures by `model_type` of config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.shared.media.families.llava import make_llava
from quire.shared.media.picture_sizes import FILES
from quire.shared.media.processor import MediaProcessor

# model_type -> function of the model's folder and config.json
PROCESSORS: dict[str, Callable[[Path, Mapping[str, Any]], MediaProcessor]] = {
    "llava": make_llava,
}


def read_media_processor(folder: Path) -> MediaProcessor | None:
    """Returns the processor of a model's pictures; None if the model takes none, if its family is not in PROCESSORS,
    or if the folder has no file that says how pictures are processed. Raises InvalidArgument if its files do not fit
    together."""
    path = folder / "config.json"
    if not path.is_file() or not any((folder / name).is_file() for name in FILES):  # GGUF, or a text model's files
        return None
    config = json.loads(path.read_text())
    make = PROCESSORS.get(config.get("model_type", ""))
    return make(folder, config) if make is not None and config.get("vision_config") else None
