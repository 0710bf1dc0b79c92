"""The text of single tokens of a byte-level BPE, looked up once and kept.

Such vocabularies write each byte as a printable character (GPT-2's alphabet): a token is a run of bytes that may begin
or end inside a UTF-8 character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tokenizers import Tokenizer as HfTokenizer

FALLBACK_BYTE = re.compile("<0x([0-9A-F]{2})>")


def _alphabet() -> dict[str, int]:
    """Character to byte: printable Latin-1 stands for itself, the other 68 bytes for characters from U+0100 on."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _alphabet()


def is_byte_level(tokenizer: HfTokenizer) -> bool:
    if tokenizer.decoder is None:
        return False
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    return [step["type"] for step in steps] == ["ByteLevel"]


def token_bytes(token: str) -> bytes:
    """A token outside the alphabet (an added one) stands for its own text."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> bytes:
    """Byte that a token of SentencePiece's byte fallback stands for, "<0xF0>"; empty for other tokens."""
    found = FALLBACK_BYTE.fullmatch(token)
    return b"" if found is None else bytes.fromhex(found[1])


class TokenPieces(dict[int, "str | bytes"]):
    """Token id to its text, or to bytes where these are not whole characters. Unknown ids have no text."""

    def __init__(self, id_to_token: Callable[[int], str | None], silent: frozenset[int]) -> None:
        """`silent`: tokens without text (special ones, where they are to be skipped)."""
        super().__init__(dict.fromkeys(silent, ""))
        self._id_to_token = id_to_token

    def __missing__(self, token_id: int) -> str | bytes:
        raw = token_bytes(self._id_to_token(token_id) or "")
        try:
            piece: str | bytes = raw.decode()
        except UnicodeDecodeError:
            piece = raw
        self[token_id] = piece
        return piece
