"""Tests of parsers on arbitrary texts, made of markup, JSON, code and words in any order.

For every text: no exception, the same result for every split, arguments that are JSON, and no word lost or doubled,
except those of a call that the end cuts off.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.services.frontend.output_processor.parsing import registry
from quire.services.frontend.output_processor.parsing.events import CallArguments, CallStart, Event
from tests.services.frontend.output_processor.parsers.reading import calls_in, pieces, reasoning_in
from tests.services.frontend.output_processor.parsers.samples import CALLS
from tests.services.frontend.output_processor.parsers.test_reasoning_parsers import ANSWERS

FORMATS = sorted(set(registry.TOOL_PARSERS.values()))
NAMES = {file: name for name, file in registry.TOOL_PARSERS.items()}
THINKERS = sorted(set(registry.REASONING_PARSERS.values()))
THINKER_NAMES = {file: name for name, file in registry.REASONING_PARSERS.items()}

WORD = re.compile(r"w\d+x")
JSON = ("{", "}", "[", "]", ":", ",", '"', "\\", "\\u", "\\ud83d", "null", "1", '"name"', '"arguments"', '"add"', "{}")
OTHERS = (
    "\n",
    " ",
    "é",
    "🙂",
    "\u3000",
    "<",
    ">",
    "</",
    "add(",
    "a=",
    ")",
    "'",
    "functions.add:0",
    "call:",
    "```",
    "=",
)
WORDS = (" w{} ", "w{}", '{{"a": "w{}"}}', '"name": "w{}"', '"arguments": {{"b": "w{}', "a='w{}'", '\n"w{}"\n')


def markup(samples: list[str]) -> tuple[str, ...]:
    """Returns the fragments of the samples: their tags and the texts between them."""
    parts = (part for sample in samples for part in re.split(r"(<[^<>]*>|\[/?[A-Z_]+\]|[{}\[\]])", sample))
    return tuple(dict.fromkeys(part for part in parts if part))


def texts(fragments: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(fragments), max_size=30).map("".join)


CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize("file", FORMATS)
def test_tool_parsers_find_the_same_for_every_split(file: str) -> None:
    samples = [text for name, text, _ in CALLS if registry.TOOL_PARSERS[name] == file]

    @settings(max_examples=40, deadline=None)
    @given(texts((*markup(samples), *samples, *JSON, *OTHERS)), CUTS)
    def check(text: str, cuts: list[int]) -> None:
        whole = calls_in(NAMES[file], [text])
        assert calls_in(NAMES[file], pieces(text, cuts)) == whole
        assert calls_in(NAMES[file], list(text)) == whole
        "".join(_texts(whole)).encode()  # raises if the text cannot be encoded
        assert all(isinstance(json.loads(event.text), dict) for event in whole if isinstance(event, CallArguments))

    check()


@pytest.mark.parametrize("file", FORMATS)
def test_tool_parsers_lose_no_word(file: str) -> None:
    samples = [text for name, text, _ in CALLS if registry.TOOL_PARSERS[name] == file]
    tags = tuple(part for part in markup(samples) if '"' not in part or "<" in part)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.sampled_from((*tags, *samples, *WORDS, *WORDS, *WORDS, "{", "}", ", ")), max_size=30))
    def check(fragments: list[str]) -> None:
        numbered = (part.format(f"{i}x") if part in WORDS else part for i, part in enumerate(fragments))
        text = "".join(numbered)
        words, found = _words([text]), _words(_texts(calls_in(NAMES[file], [text])))
        assert found <= words
        if file != "openai":  # headers and malformed arguments are dropped
            assert words - found == Counter(WORD.findall(text)[found.total() :])  # the words that were cut off

    check()


@pytest.mark.parametrize("file", THINKERS)
def test_reasoning_parsers_find_the_same_and_lose_no_word(file: str) -> None:
    samples = [text for name, text, _ in ANSWERS if registry.REASONING_PARSERS[name] == file]
    tags = tuple(part for part in markup(samples) if "<" in part or "[" in part)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.sampled_from((*tags, *tags, " w{} ", "\n", "é", "w{}")), max_size=20), CUTS, st.booleans())
    def check(fragments: list[str], cuts: list[int], is_open: bool) -> None:
        text = "".join(part.format(f"{i}x") if "w{}" in part else part for i, part in enumerate(fragments))
        whole = reasoning_in(THINKER_NAMES[file], [text], is_open=is_open)
        assert reasoning_in(THINKER_NAMES[file], pieces(text, cuts), is_open=is_open) == whole
        assert reasoning_in(THINKER_NAMES[file], list(text), is_open=is_open) == whole
        if file == "openai_gptoss":  # headers without a message are dropped
            assert _words(_texts(whole)) <= _words([text])
        else:
            assert _words(_texts(whole)) == _words([text])

    check()


def _texts(events: list[Event]) -> list[str]:
    parts = []
    for event in events:
        if isinstance(event, CallStart):
            parts.append(f" {event.name} {event.id} ")
        elif isinstance(event, CallArguments):
            parts.append(event.text)
        else:
            parts.append(event.text)
    return parts


def _words(parts: list[str]) -> Counter[str]:
    return Counter(WORD.findall("".join(parts)))
