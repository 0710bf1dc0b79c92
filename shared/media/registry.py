"""Processors of pictures by `model_type` of config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.shared.media.families.gemma3 import make_gemma3
from quire.shared.media.families.llava import make_llava
from quire.shared.media.families.pixtral import make_pixtral
from quire.shared.media.picture_sizes import FILES
from quire.shared.media.processor import MediaProcessor


def _make_of_tower(folder: Path, config: Mapping[str, Any]) -> MediaProcessor:
    """Returns the processor of a `llava` model, which depends on its vision tower."""
    make = make_pixtral if config["vision_config"].get("model_type") == "pixtral" else make_llava
    return make(folder, config)


# model_type -> function of the model's folder and config.json
PROCESSORS: dict[str, Callable[[Path, Mapping[str, Any]], MediaProcessor]] = {
    "gemma3": make_gemma3,
    "llava": _make_of_tower,
    "mistral3": make_pixtral,
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
