"""Incremental detokenizers that never emit a part of a character.

However the tokens are split into pushes, the texts add up to the full decode of all tokens (with byte-fallback
vocabularies: of all valid ones; there an invalid byte would change text that has been sent long before).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from quire.services.frontend.tokenizer.pieces import TokenPieces
from quire.services.frontend.tokenizer.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
PROMPT_END = 24  # last tokens of a prompt that are searched for whole characters
PRIMING_TOKENS = 4  # minimum number of them that is decoded
LONGEST_CHARACTER = 4  # bytes of UTF-8, and so the tokens that an unfinished character can take

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Incremental detokenizer of one sample."""

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes."""

    def flush(self) -> str:
        """Returns the remaining text at the end; an unfinished character becomes U+FFFD."""


class ByteLevelDetokenizer:
    """Detokenizer for byte-level BPE: a dictionary lookup per token; bytes are decoded only around split characters."""

    __slots__ = ("_decoder", "_mid_character", "_pieces")

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._decoder = _new_decoder("replace")
        self._mid_character = False

    def push(self, token_id: int) -> str:
        """Returns the characters that the token completes; bytes of an unfinished character are kept."""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._mid_character or not piece:
                return piece
            piece = piece.encode()
        text = self._decoder.decode(piece)
        self._mid_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Returns the bytes of an unfinished character as U+FFFD, and resets the detokenizer."""
        self._mid_character = False
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for all other vocabularies: decodes a short window of the last tokens with and without the new ones.

    The window starts at the tokens after the last emitted text, because decoders of this kind treat the first token
    that they get differently (they drop its leading space). The first window is the end of the prompt.
    """

    __slots__ = ("_decode", "_known", "_start", "_window")

    def __init__(self, decode: Callable[[list[int]], str], prompt_end: Sequence[int]) -> None:
        self._decode = decode
        self._window, self._known = prime_window(decode, prompt_end)
        # first token of the window whose text is not yet known; _known: the text before it
        self._start = len(self._window)

    def push(self, token_id: int) -> str:
        """Returns the text that the token adds, "" while it ends in an unfinished character, for at most
        LONGEST_CHARACTER tokens."""
        self._window.append(token_id)
        text = self._decode(self._window)
        waiting = len(self._window) - self._start
        if text.endswith(REPLACEMENT) and waiting < LONGEST_CHARACTER:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        """Returns the text beyond the known one and makes the unread tokens the new context for decoding."""
        new = text[len(self._known) :]
        if new:
            self._window = self._window[self._start :]
            self._start = len(self._window)
            self._known = self._decode(self._window)
        return new

    def flush(self) -> str:
        return self._advance(self._decode(self._window))


class UnspacedAddedTokens:
    """Detokenizer for spaces_between_special_tokens=False: writes no space between consecutive added tokens."""

    __slots__ = ("_added_token", "_after_added", "_inner", "flush")

    def __init__(self, inner: Detokenizer, tokenizer: Tokenizer) -> None:
        self._inner = inner
        self._added_token = tokenizer.added_token
        self._after_added = False
        self.flush = inner.flush

    def push(self, token_id: int) -> str:
        """Returns the token's text, without the space that decoding puts between two added tokens."""
        text = self._inner.push(token_id)
        added = self._added_token(token_id)
        if added is not None and self._after_added and text.strip() == added:
            text = added
        self._after_added = added is not None
        return text


def prime_window(decode: Callable[[list[int]], str], prompt_end: Sequence[int]) -> tuple[list[int], str]:
    """Returns the last prompt tokens that decode to whole characters, and their text; empty if the prompt ends within a
    character."""
    for size in range(min(PRIMING_TOKENS, len(prompt_end)), len(prompt_end) + 1):
        window = list(prompt_end[len(prompt_end) - size :])
        text = decode(window)
        if text and not text.startswith(REPLACEMENT):
            return ([], "") if text.endswith(REPLACEMENT) else (window, text)
    return [], ""


def new_detokenizer(
    tokenizer: Tokenizer,
    *,
    prompt_end: Sequence[int] = (),
    skip_special_tokens: bool,
    spaces_between_special_tokens: bool = True,
    shown: frozenset[str] = frozenset(),
) -> Detokenizer:
    """Returns a detokenizer for the vocabulary.

    `prompt_end`: the prompt's last tokens; `shown`: special tokens that are never skipped.
    """
    if tokenizer.byte_level:  # adds no spaces
        return ByteLevelDetokenizer(tokenizer.pieces(skip_special_tokens=skip_special_tokens, shown=shown))
    decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, shown=shown)
    detokenizer = WindowDetokenizer(decode, prompt_end)
    return detokenizer if spaces_between_special_tokens else UnspacedAddedTokens(detokenizer, tokenizer)
