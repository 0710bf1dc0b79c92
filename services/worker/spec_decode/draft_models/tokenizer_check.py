"""Checks that a draft model's tokens are the target model's; another vocabulary of the same size makes drafts
useless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument

FILE = "tokenizer.json"


def check_same_tokens(folder: Path, model: Path) -> None:
    """Raises InvalidArgument naming the first token that differs between the tokenizer.json of the draft's `folder` and
    of the target `model`; accepts folders without tokenizer.json unchecked."""
    target_tokens, draft_tokens = _tokens(model), _tokens(folder)
    if target_tokens is None or draft_tokens is None or target_tokens == draft_tokens:
        return
    first = min(i for i in target_tokens.keys() | draft_tokens.keys() if target_tokens.get(i) != draft_tokens.get(i))
    draft_token, target_token = (
        repr(tokens[first]) if first in tokens else "none" for tokens in (draft_tokens, target_tokens)
    )
    text = (
        f"token {first} is {draft_token} in {folder / FILE} and {target_token} in {model / FILE}: "
        "drafts need the model's tokenizer"
    )
    raise InvalidArgument(f"speculative_config.model: {text}", field="speculative_config")


def _tokens(folder: Path) -> dict[int, str] | None:
    """Reads the tokens of tokenizer.json by id; None if the folder has none. Raises InvalidArgument for a file that is
    no tokenizer."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        vocabulary = values["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram's, with scores
            tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(vocabulary)}
        else:
            tokens = {int(token_id): str(text) for text, token_id in vocabulary.items()}
        return tokens | {int(token["id"]): str(token["content"]) for token in values.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        text = f"speculative_config.model: {path} is not a valid tokenizer.json: {error!r}"
        raise InvalidArgument(text, field="speculative_config") from None
