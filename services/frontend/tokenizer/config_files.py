"""Reading of the small JSON files in the model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument


def read_optional_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in `path`; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"model: {path} is not JSON: {error}", field="model") from None
    if not isinstance(document, dict):
        raise InvalidArgument(f"model: {path} is not a JSON object", field="model")
    return document


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns the texts of bos_token, eos_token and the like; tokenizer_config.json overrides
    special_tokens_map.json."""
    texts: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in read_optional_json(folder / file).items():
            if not name.endswith("_token"):
                continue
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[name] = text
    return texts
