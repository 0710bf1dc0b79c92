"""Walks through a grammar that search for states without a continuation in which the text may not end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher

from quire.shared.structured_output.checks import DEAD_END

NUM_CHOICES = 48  # maximum number of choices per walk; forced tokens are consumed at once
STEP_ITEMS = 2_000  # of llguidance, per step: a walk that needs more stops without a result
NUM_BYTES = 256
SHOWN_CHARACTERS = 60
CLOSING, CONTINUING = b'}]" ', b'," '  # white space last: one space rather than a line's indentation
Choose = Callable[[Sequence[int]], int]


def find_dead_end(start: LLMatcher, first: int) -> str:
    """Returns the text of a walk that reaches a dead end; empty if none does.

    `first`: the token of byte 0; those of all other bytes and the end follow it.
    """
    rng = random.Random(0)
    walks: tuple[Choose, ...] = (
        lambda choices: _wanted([first + byte for byte in CLOSING], choices),
        lambda choices: _wanted([first + byte for byte in CONTINUING], choices),
        lambda choices: choices[-1],
        rng.choice,
    )
    return next((found for choose in walks if (found := _walk(start.deep_copy(), first, choose))), "")


def _wanted(wanted: Sequence[int], choices: Sequence[int]) -> int:
    return next((token for token in wanted if token in choices), choices[0])


def _walk(matcher: LLMatcher, first: int, choose: Choose) -> str:
    """Follows one walk of up to NUM_CHOICES tokens, which never ends the text where it may continue. Returns the
    text so far if it runs into a dead end, otherwise "", also if the matcher exceeds its limits."""
    tokens_so_far: list[int] = []
    for _ in range(NUM_CHOICES):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if matcher.is_error():
            return _written(tokens_so_far, first) if DEAD_END in matcher.get_error() else ""
        choices = allowed[allowed < first + NUM_BYTES].tolist()
        if not choices:
            return "" if matcher.is_accepting() or len(allowed) else _written(tokens_so_far, first)
        tokens = [choose(choices)]
        if matcher.try_consume_tokens(tokens) != 1 or matcher.is_error():
            return ""
        forced = matcher.compute_ff_tokens()
        tokens_so_far += tokens + forced[: matcher.try_consume_tokens(forced)]
    return ""


def _written(tokens: Sequence[int], first: int) -> str:
    """Returns the quoted text of the tokens, at most its last SHOWN_CHARACTERS characters, for an error text."""
    text = bytes(token - first for token in tokens if token >= first).decode(errors="replace")
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"... {text[-SHOWN_CHARACTERS:]}")
