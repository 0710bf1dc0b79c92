"""Texts of the single tokens of a byte-level BPE, cached.

Such vocabularies write each byte as a printable character (GPT-2's alphabet): a token is a run of bytes that may begin
or end within a UTF-8 character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tokenizers import Tokenizer as HfTokenizer

FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _alphabet() -> dict[str, int]:
    """Returns the byte of each character: printable Latin-1 is unchanged, the other 68 bytes follow from U+0100 on."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _alphabet()


def is_byte_level(tokenizer: HfTokenizer) -> bool:
    """Returns whether the tokenizer's only decoder is ByteLevel, so that each token is a fixed run of bytes."""
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    return [step["type"] for step in steps] == ["ByteLevel"]


def token_bytes(token: str) -> bytes:
    """Returns the bytes of a token; one with characters outside the alphabet (an added token) is its literal text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> bytes:
    """Returns the byte of a token of SentencePiece's byte fallback, "<0xF0>"; empty for other tokens."""
    match = FALLBACK_BYTE.fullmatch(token)
    return b"" if match is None else bytes.fromhex(match[1])


class TokenPieces(dict[int, "str | bytes"]):
    """Map from token id to text, or to bytes where these are not whole characters. Unknown ids have no text."""

    def __init__(self, id_to_token: Callable[[int], str | None], without_text: frozenset[int]) -> None:
        """Creates a cache with the tokens without text only.

        `without_text`: the tokens without text (special ones, where they are skipped).
        """
        super().__init__(dict.fromkeys(without_text, ""))
        self._id_to_token = id_to_token

    def __missing__(self, token_id: int) -> str | bytes:
        """Decodes and caches a token: as text, or as bytes if it is not valid UTF-8 alone. Unknown ids are empty
        texts."""
        raw = token_bytes(self._id_to_token(token_id) or "")
        try:
            piece: str | bytes = raw.decode()
        except UnicodeDecodeError:
            piece = raw
        self[token_id] = piece
        return piece
