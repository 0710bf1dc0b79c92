"""Tests that a stop string ends the text at the same place for every split, and that no part of it is emitted
before."""

from __future__ import annotations

import random

import pytest

from quire.services.frontend.output_processor.stop_strings import StopStrings


def run(stops: list[str], parts: list[str], include: bool = False) -> tuple[str, str | None]:
    finder = StopStrings(stops, include=include)
    out = ""
    for part in parts:
        text, stop = finder.push(part)
        out += text
        if stop is not None:
            return out, stop
    return out + finder.flush(), None


def expected(stops: list[str], text: str, include: bool = False) -> tuple[str, str | None]:
    """Returns the result by definition: the first end of any match, of those the longest string."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


def splits(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("include", [False, True])
def test_all_splits_give_equal_output(include: bool) -> None:
    rng = random.Random(5)
    for _ in range(5000):
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 14)))
        assert run(stops, splits(text, rng), include) == expected(stops, text, include), (stops, text)


def test_every_split_of_a_stop_string_is_held_back() -> None:
    for cut in range(len("<|end|>") + 1):
        finder = StopStrings(["<|end|>"], include=False)
        assert finder.push("text" + "<|end|>"[:cut])[0] == "text"
        assert finder.push("<|end|>"[cut:] + "more") == ("", "<|end|>") or cut == len("<|end|>")


def test_text_that_only_begins_like_a_stop_string_is_emitted() -> None:
    finder = StopStrings(["STOP"], include=False)
    assert finder.push("a ST") == ("a ", None)
    assert finder.push("AR") == ("STAR", None)


def test_the_first_to_complete_wins_over_the_first_to_begin() -> None:
    assert run(["abcdef", "cd"], ["abcdef"]) == ("ab", "cd")


def test_the_longer_of_two_simultaneous_matches_is_cut() -> None:
    assert run(["d", "bcd"], ["abcd"]) == ("a", "bcd")


def test_matches_that_complete_below_min_tokens_do_not_count() -> None:
    finder = StopStrings(["ab"], include=False)
    assert finder.push("ab", may_stop=False) == ("ab", None)
    assert finder.push("a", may_stop=False) == ("", None)
    assert finder.push("b", may_stop=True) == ("", "ab")


def test_included_stop_string_needs_no_holding_back() -> None:
    finder = StopStrings(["STOP"], include=True)
    assert finder.push("ST") == ("ST", None)
    assert finder.push("OP!") == ("OP", "STOP")


def test_long_stop_strings_cost_no_more_per_character() -> None:
    finder = StopStrings(["a" * 50_000 + "b"], include=False)
    for _ in range(100):
        finder.push("a" * 1000)
    assert finder.push("b")[1] is not None
