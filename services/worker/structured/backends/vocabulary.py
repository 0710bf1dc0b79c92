"""The model's tokens as grammar libraries want them: the bytes of each, which are special, which end a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer

from quire.shared.columns import I32
from quire.shared.errors import Unimplemented
from quire.shared.structured_output.literals import SpecialTokens

MASK_BITS = 32


def bit(token_id: int) -> np.int32:
    """Of a token in its word."""
    return np.uint32(1 << token_id % MASK_BITS).view(np.int32)


def words_of(token_ids: Sequence[int] | I32, num_words: int) -> I32:
    """A mask that allows these tokens."""
    allowed = np.zeros(num_words * MASK_BITS, dtype=np.bool_)
    allowed[np.asarray(token_ids, dtype=np.int64)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


@dataclass(frozen=True)
class ModelVocabulary:
    """Of a model's folder, read once for each library."""

    tokenizer: LLTokenizer
    specials: SpecialTokens
    size: int
    ends: Sequence[int]  # tokens that end a text

    @classmethod
    def read(
        cls, folder: Path, size: int, eos_token_ids: Sequence[int], slices: Sequence[str] | None = None
    ) -> ModelVocabulary:
        """`slices`: for llguidance. Raises Unimplemented where there is no tokenizer.json."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            text = f"structured_output: the worker's model folder {folder} has no tokenizer.json"
            raise Unimplemented(text, field="structured_output")
        ends = list(eos_token_ids) or None
        options = {} if slices is None else {"slices": list(slices)}
        tokenizer = LLTokenizer(str(path), n_vocab=size, eos_token=ends, **options)
        ends_found = [token_id for token_id in tokenizer.eos_tokens if token_id < size]
        return cls(tokenizer, _specials(path, tokenizer), size, ends_found)

    @cached_property
    def texts(self) -> list[bytes]:
        """What each token spells; empty for those that no text holds: control tokens, ends, gaps."""
        silent = {*self.specials.ids.values(), *self.ends} - self.specials.in_text
        return [b"" if i in silent else self.tokenizer.decode_bytes([i]) for i in range(self.size)]

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return -(-self.size // MASK_BITS)


def _specials(path: Path, tokenizer: LLTokenizer) -> SpecialTokens:
    """llguidance takes for special what the tokenizer calls so, and whatever looks like <name>."""
    added = json.loads(path.read_bytes()).get("added_tokens", [])
    found = [token for token in added if tokenizer.is_special_token(token["id"])]
    ids = {token["content"]: token["id"] for token in found}
    return SpecialTokens(ids, frozenset(token["id"] for token in found if not token["special"]))
