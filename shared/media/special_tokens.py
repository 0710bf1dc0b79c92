"""Special tokens of pictures: their ids and texts in a tokenizer's files, read without a tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from pathlib import Path

    from quire.shared.media.processor import PromptTokenizer

SETTINGS, TOKENIZER = "tokenizer_config.json", "tokenizer.json"


def token_id(folder: Path, text: str, default: int) -> int:
    """Returns the id of an added token of the folder's tokenizer; `default` if its files do not list it."""
    decoder = read_settings(folder).get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for number, token in decoder.items():
            if isinstance(token, dict) and token.get("content") == text:
                return int(number)
    path = folder / TOKENIZER
    added = json.loads(path.read_text()).get("added_tokens") if path.is_file() else None
    for token in added or ():
        if token.get("content") == text:
            return int(token["id"])
    return default


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json; empty if the folder has none."""
    path = folder / SETTINGS
    values: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return values


def single_token(tokenizer: PromptTokenizer, text: str) -> int:
    """Returns the one token of `text`. Raises InvalidArgument if the tokenizer splits it."""
    tokens = tokenizer.encode(text)
    if len(tokens) != 1:
        raise InvalidArgument(
            f"{TOKENIZER}: {text!r} is not a token, but pictures of this model require it; the tokenizer belongs to "
            "another model",
            field="model",
        )
    return tokens[0]
