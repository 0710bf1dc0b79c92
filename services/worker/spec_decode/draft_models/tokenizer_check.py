"""Whether a draft model's tokens are the model's, one by one: others, if as many, would make its drafts nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument

FILE = "tokenizer.json"


def check_same_tokens(folder: Path, model: Path) -> None:
    """Raises InvalidArgument with the first token that differs. Of a folder without tokenizer.json nothing is known."""
    ours, theirs = _tokens(model), _tokens(folder)
    if ours is None or theirs is None or ours == theirs:
        return
    first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    said, wanted = (repr(of[first]) if first in of else "none" for of in (theirs, ours))
    text = (
        f"token {first} is {said} in {folder / FILE} and {wanted} in {model / FILE}: drafts need the model's tokenizer"
    )
    raise InvalidArgument(f"speculative_config.model: {text}", field="speculative_config")


def _tokens(folder: Path) -> dict[int, str] | None:
    """By id."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        vocabulary = values["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram's, with scores
            found = {token_id: str(entry[0]) for token_id, entry in enumerate(vocabulary)}
        else:
            found = {int(token_id): str(text) for text, token_id in vocabulary.items()}
        return found | {int(token["id"]): str(token["content"]) for token in values.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        text = f"speculative_config.model: {path} is no tokenizer: {error!r}"
        raise InvalidArgument(text, field="speculative_config") from None
