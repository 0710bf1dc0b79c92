"""Processors of pictures by `model_type` of config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.shared.media.families.llava import make_llava
from quire.shared.media.families.qwen_vl import make_qwen_vl
from quire.shared.media.picture_sizes import FILES
from quire.shared.media.processor import MediaProcessor

# model_type -> function of the model's folder and config.json
PROCESSORS: dict[str, Callable[[Path, Mapping[str, Any]], MediaProcessor]] = {
    "llava": make_llava,
    "qwen2_5_vl": make_qwen_vl,
    "qwen2_vl": make_qwen_vl,
    "qwen3_vl": make_qwen_vl,
    "qwen3_vl_moe": make_qwen_vl,
}


def read_media_processor(folder: Path) -> MediaProcessor | None:
    """Returns the processor of a model's pictures; None if the model takes none, its family is not in PROCESSORS, or
    the folder has no processor's file: the model is then served for text alone. Raises InvalidArgument if its files do
    not fit together."""
    path = folder / "config.json"
    if not path.is_file():  # GGUF
        return None
    config = json.loads(path.read_text())
    make = PROCESSORS.get(config.get("model_type", ""))
    if make is None or not config.get("vision_config") or not any((folder / name).is_file() for name in FILES):
        return None
    return make(folder, config)
