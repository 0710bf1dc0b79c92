"""The model's tokens in the form that grammar libraries need: each token's bytes, special tokens, end tokens."""

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
    """Returns the bit of a token in its mask word, the word number token_id // 32."""
    return np.uint32(1 << token_id % MASK_BITS).view(np.int32)


def words_of(token_ids: Sequence[int] | I32, num_words: int) -> I32:
    """Returns a mask that allows exactly these tokens, int32 [num_words]."""
    allowed = np.zeros(num_words * MASK_BITS, dtype=np.bool_)
    allowed[np.asarray(token_ids, dtype=np.int64)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


@dataclass(frozen=True)
class ModelVocabulary:
    """Vocabulary of a model folder as llguidance's tokenizer reads it, read once per library."""

    tokenizer: LLTokenizer
    specials: SpecialTokens
    size: int
    ends: Sequence[int]  # tokens that end a text

    @classmethod
    def read(
        cls, folder: Path, size: int, eos_token_ids: Sequence[int], slices: Sequence[str] | None = None
    ) -> ModelVocabulary:
        """Reads tokenizer.json; `slices`: for llguidance. Raises Unimplemented if the folder has none."""
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
        """Bytes that each token spells; empty for tokens that no text contains: control tokens, end tokens,
        unused ids."""
        not_in_text = {*self.specials.ids.values(), *self.ends} - self.specials.in_text
        return [b"" if i in not_in_text else self.tokenizer.decode_bytes([i]) for i in range(self.size)]

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-self.size // MASK_BITS)


def _specials(path: Path, tokenizer: LLTokenizer) -> SpecialTokens:
    """Returns the special tokens that tokenizer.json adds, and which of them are text; llguidance treats those of the
    tokenizer and everything of the form <name> as special."""
    added = json.loads(path.read_bytes()).get("added_tokens", [])
    specials = [token for token in added if tokenizer.is_special_token(token["id"])]
    ids = {token["content"]: token["id"] for token in specials}
    return SpecialTokens(ids, frozenset(token["id"] for token in specials if not token["special"]))
