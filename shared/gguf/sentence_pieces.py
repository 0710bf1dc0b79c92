"""Tokenizers of type `tokenizer.ggml.model: llama`: SentencePiece BPE with scores; and `gemma4`: the same pieces with
explicit merges.

SentencePiece merges the pair whose piece has the highest score first, so the pairs ordered by these scores are the
merges.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from quire.shared.gguf.byte_pairs import read_merges
from quire.shared.gguf.kinds import TokenKind

if TYPE_CHECKING:
    from quire.shared.gguf.tokenizer import GgufVocabulary

SCORES = "tokenizer.ggml.scores"
ADD_PREFIX = "tokenizer.ggml.add_space_prefix"
SPACE = "\u2581"
MAX_PIECE = 256  # characters; splitting a longer piece would be too expensive


def parts(words: GgufVocabulary) -> dict[str, Any]:
    """Returns parts of a tokenizer.json, with merges made of scores."""
    return _parts(words, _merges(words), prefixed=words.values.flag(ADD_PREFIX, True))


def parts_with_merges(words: GgufVocabulary) -> dict[str, Any]:
    """Returns parts of a tokenizer.json, with the file's merges; texts are not cut into words."""
    return _parts(words, read_merges(words), prefixed=False)


def _parts(words: GgufVocabulary, merges: list[list[str]], *, prefixed: bool) -> dict[str, Any]:
    """Returns the parts of a tokenizer.json for pieces in which a special character stands for a space. `prefixed`:
    a space is put before each text, and removed again from decoded text."""
    unknown = words.token("unknown_token_id")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown[1] if unknown else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": TokenKind.BYTE in words.kinds,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(words.tokens)},
            "merges": merges,
        },
    }


def _merges(words: GgufVocabulary) -> list[list[str]]:
    """Returns the merges that the pieces' scores imply, highest score first. Raises InvalidArgument unless every
    token has a score."""
    scores = words.values.numbers(SCORES)
    if len(scores) != len(words.tokens):
        raise words.header.refusal(f"{SCORES}: {len(scores)} for {len(words.tokens)} tokens")
    made_of = (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    ids = {text: number for number, text in enumerate(words.tokens) if words.kinds[number] in made_of}
    ranked = sorted(ids, key=lambda text: -scores[ids[text]])
    return [*itertools.chain.from_iterable(_pairs(text, ids) for text in ranked)]


def _pairs(text: str, ids: dict[str, int]) -> list[list[str]]:
    """Returns the pairs of known pieces that form `text`, ordered by their token ids; none for texts longer than
    MAX_PIECE."""
    if len(text) > MAX_PIECE:
        return []
    found = [(text[:at], text[at:]) for at in range(1, len(text))]
    known = [pair for pair in found if pair[0] in ids and pair[1] in ids]
    return [list(pair) for pair in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
