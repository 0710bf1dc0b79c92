"""The byte-level BPE tokenizer: how it is trained, and a faster way to apply it to generated text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.evals import SKILLS, Split, load
from tools.training.chat import IMAGE, segments

VOCAB_SIZE = 4096
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that decoding leaves out of the text."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
"""Single tokens that are part of the text, since parsers of tool calls and of reasoning look for them there."""
RESERVED_TOKENS = (IMAGE, *(f"<|reserved_{i}|>" for i in range(1, 7)))
"""Tokens that no text was trained with. The first stands for a picture."""

# A word with the space before it, one digit, a run of marks, or white space. A digit is always a token of its own, so a
# number is spelled in one way only and arithmetic sees its places.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII_PIECES = re.compile(r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
_ADDED = re.compile("|".join(re.escape(token) for token in (*CONTROL_TOKENS, *MARKUP_TOKENS, *RESERVED_TOKENS)))


def _training_text(seed: int, per_size: int) -> Iterator[str]:
    """Generated conversations of every skill, the long ones of one size only: what counts is which words there are."""
    rng = Random(f"tokenizer/{seed}")
    for name in SKILLS:
        for size in load(name).sizes:
            # Text in other scripts stays bytes, so that its characters take several tokens.
            if size == "unicode" or (name == "recall" and size != "1k"):
                continue
            for _ in range(per_size):
                item = load(name).sample(rng, Split.TRAIN, size)
                yield from (text for text, _ in segments(item.messages, item.tools))
                yield item.expected


def train_tokenizer(seed: int, per_size: int = 4000) -> Tokenizer:
    """Trains the byte-level BPE on generated text of the skills, sampled from `seed`, with `per_size` items of each
    size class."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*CONTROL_TOKENS, *MARKUP_TOKENS, *RESERVED_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(seed, per_size), trainer)
    return _with_visible_markup(tokenizer)


def _with_visible_markup(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, whose decoding keeps the markup tokens: a trainer can only make tokens that it leaves out."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] not in MARKUP_TOKENS
    return Tokenizer.from_str(json.dumps(state))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a model folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class FastEncoder:
    """Encodes as the tokenizer does, remembering the tokens of each piece. One process feeds 1M tokens/s this way.

    BPE never merges across pieces, so a piece's tokens depend on nothing else. Only ASCII takes the short way, where
    Python's character classes and the tokenizer's agree.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, exactly those of the tokenizer; only ASCII takes the fast way through the
        cache."""
        if not text.isascii():
            return self._whole(text)
        ids: list[int] = []
        start = 0
        for added in _ADDED.finditer(text):
            self._extend(ids, text[start : added.start()])
            ids += self._piece(added[0])
            start = added.end()
        self._extend(ids, text[start:])
        return ids

    def _extend(self, ids: list[int], text: str) -> None:
        for piece in _ASCII_PIECES.findall(text):
            ids += self._piece(piece)

    def _piece(self, piece: str) -> list[int]:
        """Returns the ids of one piece of text from a cache that is cleared at 200,000 entries."""
        known = self._known.get(piece)
        if known is None:
            # Invented words are without end; a bound keeps the memory of a feeding process small.
            if len(self._known) > 200_000:
                self._known.clear()
            known = self._known[piece] = self._whole(piece)
        return known

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
