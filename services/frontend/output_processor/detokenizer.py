"""Tokens to text as they come, never half a character.

Whatever the split into pushes, the texts add up to the full decode of all tokens (with byte-fallback vocabularies: of
all valid ones; there an invalid byte would change text that has long been sent).
"""

from __future__ import annotations

import codecs
from functools import partial
from typing import Protocol

from services.frontend.tokenizer.pieces import TokenPieces
from services.frontend.tokenizer.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4  # bytes of UTF-8, so also tokens, that an unfinished character can wait for

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One per sample."""

    def push(self, token_id: int) -> str:
        """The text that this token completes."""

    def flush(self) -> str:
        """What is left when no token follows: an unfinished character becomes U+FFFD."""


class ByteLevelDetokenizer:
    """For byte-level BPE: a dictionary lookup per token; bytes are only looked at around split characters."""

    __slots__ = ("_decoder", "_pieces", "_torn")

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._decoder = _new_decoder("replace")
        self._torn = False

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._torn or not piece:
                return piece
            piece = piece.encode()
        text = self._decoder.decode(piece)
        self._torn = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._torn = False
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For every other vocabulary: decodes a short window of the last tokens with and without the new ones.

    The window starts at the tokens behind the last text that came out, because decoders of this kind treat the first
    token of what they see differently (they drop its leading space).
    """

    __slots__ = ("_decode", "_known", "_start", "_window")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, shown: frozenset[str]) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, shown=shown)
        self._window: list[int] = []
        self._start = 0  # of the tokens in the window whose text is still unknown
        self._known = ""  # text of those before

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        waiting = len(self._window) - self._start
        if text.endswith(REPLACEMENT) and waiting < LONGEST_CHARACTER:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:
            self._window = self._window[self._start :]
            self._start = len(self._window)
            self._known = self._decode(self._window)
        return new

    def flush(self) -> str:
        return self._advance(self._decode(self._window))


class JoinedAddedTokens:
    """spaces_between_special_tokens=False: an added token that follows another is written as it is."""

    __slots__ = ("_added_token", "_after_added", "_inner", "flush")

    def __init__(self, inner: Detokenizer, tokenizer: Tokenizer) -> None:
        self._inner = inner
        self._added_token = tokenizer.added_token
        self._after_added = False
        self.flush = inner.flush

    def push(self, token_id: int) -> str:
        text = self._inner.push(token_id)
        added = self._added_token(token_id)
        if added is not None and self._after_added and text.strip() == added:
            text = added
        self._after_added = added is not None
        return text


def new_detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool = True,
    shown: frozenset[str] = frozenset(),
) -> Detokenizer:
    """`shown`: special tokens that are not skipped in any case."""
    if tokenizer.byte_level:  # which has no spaces of its own
        return ByteLevelDetokenizer(tokenizer.pieces(skip_special_tokens=skip_special_tokens, shown=shown))
    detokenizer = WindowDetokenizer(tokenizer, skip_special_tokens, shown)
    return detokenizer if spaces_between_special_tokens else JoinedAddedTokens(detokenizer, tokenizer)
