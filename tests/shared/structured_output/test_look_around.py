"""Patterns with look-ahead and word boundaries, as schema generators write them, are enforced exactly."""

from __future__ import annotations

import json
import random
import re

import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.structured_output import automaton
from quire.shared.structured_output.look_around import plain_patterns
from tests.shared.test_structured_output import accepts

# zod 4's z.email(): email-mcp#58
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
PATTERNS = {
    EMAIL: ("a.b@c.de", ".a@c.de", "a..b@c.de", "a@c"),
    r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d).{8,}$": ("Abcdef12", "abcdefg1", "Ab1", "ABCDEFG1"),  # a password
    r"^\bfoo\b$": ("foo", "foo ", " foo"),  # ggml-org/llama.cpp#22314
    r"\bfoo\b": ("a foo.", "food", "afoo"),
    r"^(?!foo)[a-z]+$": ("bar", "fo", "foo", "food"),
    r"^(?!.*--)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?$": ("a-b", "a--b", "-a", "a"),  # a slug
    r"^(?!000)[0-9]{3}-(?!00)[0-9]{2}$": ("123-45", "000-45", "123-00"),  # a social security number
    r"^(?<year>[0-9]{4})(?!-00)-[0-9]{2}$": ("2024-01", "2024-00"),
    r"^(?:(?=a)[a-f]|b)c$": ("ac", "bc", "dc"),
    r"^(?=.{1,64}$)[a-z]+$": ("a", "a" * 64, "a" * 65),
    r"(?=b)\w\B[bc]?": ("abc", "ab", "b ", "bc"),
    r"^a(?!b$)b?c?$": ("a", "ab", "abc"),
}


def fulfils(pattern: str, text: str) -> bool:
    return re.search(pattern.replace("(?<year>", "(?P<year>"), text) is not None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_text_of_a_schema_fulfils_its_pattern(pattern: str) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    verdicts = {fulfils(pattern, text) for text in PATTERNS[pattern]}
    assert verdicts == {True, False}
    for text in PATTERNS[pattern]:
        assert accepts(json.dumps(text), json_schema=schema) == fulfils(pattern, text), text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_matches_as_a_whole(pattern: str) -> None:
    for text in PATTERNS[pattern]:
        whole = re.fullmatch(pattern.replace("(?<year>", "(?P<year>"), text) is not None
        assert accepts(text, regex=pattern) == whole, text


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_at_random_are_judged_alike(pattern: str) -> None:
    rng = random.Random(pattern)
    plain = [re.compile(re.sub(r"\\x\{([0-9A-F]+)\}", _character, each)) for each in plain_patterns(pattern)]
    for _ in range(2000):
        text = "".join(rng.choice("abcfoAB1204-.@_ ") for _ in range(rng.randrange(10)))
        text = rng.choice(PATTERNS[pattern])[: rng.randrange(70)] + text if rng.random() < 0.5 else text
        assert all(each.search(text) for each in plain) == fulfils(pattern, text), text


def _character(found: re.Match[str]) -> str:
    return f"\\U{int(found[1], 16):08x}"


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?<=a)b", "assert cannot be combined"),
        ("^((?!ab)[a-z])+$", "look-ahead inside a repetition"),
        (r"^(?=a)\p{L}(?=b)b$", "bad escape"),
        ("^(?=[a-z]{5000})[a-z]*$", "more than 100 repetitions"),
        ("^(?=(.*a.{0,30}b.*){20})x", "too large"),
        ("^(?!a)(?=a)a(?=c)b$", "no text satisfies"),
    ],
)
def test_what_cannot_be_written_without_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        plain_patterns(pattern)


def test_expressions_keep_their_bounds() -> None:
    wide = automaton.characters([(97, 122)])
    with pytest.raises(automaton.TooLarge):
        automaton.plain(automaton.repeated(wide, automaton.MAX_STATES, None))
    assert automaton.plain(automaton.NOTHING) == ""
