"""Tokenizer that reads every text as text: the model's, with control tokens that no text can spell."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Tokenizer as HfTokenizer


def plain_tokenizer(tokenizer: HfTokenizer, marks: Iterable[str]) -> tuple[HfTokenizer, str]:
    """Returns the tokenizer without `marks` (at least one), and an opener token.

    Each mark gets an unguessable name, so that all ids stay the same. The opener is one of these names: text after it
    is not at the beginning.
    """
    document = json.loads(tokenizer.to_str(pretty=False))
    names = {mark: f"\U000f0000{secrets.token_hex(16)}" for mark in marks}
    changed = {
        **document,
        "added_tokens": [_renamed(token, names) for token in document["added_tokens"]],
        "post_processor": None,  # special tokens are added around the whole prompt only
        "model": _model(document["model"], names),
    }
    return HfTokenizer.from_str(json.dumps(changed)), next(iter(names.values()))


def _renamed(token: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns an added token's entry under its new name, without normalization and stripping; others are unchanged."""
    if token["content"] not in names:
        return dict(token)
    own = {"content": names[token["content"]], "normalized": False}
    return {**token, **own, "single_word": False, "lstrip": False, "rstrip": False}


def _model(model: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Renames control tokens in the vocabulary, so that they neither match a text nor result from merges."""
    changed = dict(model)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        changed["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        changed["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("merges"):
        changed["merges"] = [merge for merge in model["merges"] if not _makes_any(merge, names)]
    if model.get("unk_token") is not None:
        changed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return changed


def _makes_any(merge: str | list[str], names: Mapping[str, str]) -> bool:
    """Returns whether a merge of the vocabulary reads or produces a token that is renamed."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
