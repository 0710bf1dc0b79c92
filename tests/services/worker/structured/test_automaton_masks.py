"""Masks of automata over characters, compared with walking each token separately."""

from __future__ import annotations

import random

import pytest

from quire.services.worker.structured.backends.automaton_masks import Automaton, CharacterColumns

TEXTS = {3: "a", 5: "ab", 7: "b", 8: "abab", 11: "c", 12: "cab", 20: "ba", 21: "é", 30: "aé", 31: "a" * 40}
# The automaton of (ab)*c: state 0 is between two pairs, 1 after an a, 2 after the c.
PAIRS = {0: {0: 1, 2: 2}, 1: {1: 0}, 2: {}}
SYMBOLS = {"a": 0, "b": 1, "c": 2}


def test_allowed_tokens_of_a_state() -> None:
    tokens = CharacterColumns(TEXTS)
    automaton = Automaton.from_transitions(PAIRS, [SYMBOLS.get(character) for character in tokens.characters])
    assert sorted(automaton.allowed(0, tokens).tolist()) == [3, 5, 8, 11]
    assert sorted(automaton.allowed(1, tokens).tolist()) == [7, 20]
    assert automaton.allowed(2, tokens).tolist() == []
    assert automaton.allowed(99, tokens).tolist() == [], "an unknown state allows nothing"


@pytest.mark.parametrize("seed", range(4))
def test_random_automata_allow_the_same_as_single_walks(seed: int) -> None:
    chance = random.Random(seed)
    texts = {i: "".join(chance.choices("abcd", k=chance.randrange(1, 7))) for i in range(0, 400, 2)}
    map_ = {s: {symbol: chance.randrange(6) for symbol in range(4) if chance.random() < 0.6} for s in range(6)}
    tokens = CharacterColumns(texts)
    automaton = Automaton.from_transitions(map_, ["abcd".index(character) for character in tokens.characters])

    def leads_on(state: int | None, text: str) -> bool:
        for character in text:
            state = map_.get(state, {}).get("abcd".index(character)) if state is not None else None
        return state is not None

    for state in map_:
        expected = [token_id for token_id, text in texts.items() if leads_on(state, text)]
        assert sorted(automaton.allowed(state, tokens).tolist()) == expected


def test_a_vocabulary_without_texts_allows_nothing() -> None:
    tokens = CharacterColumns({})
    assert Automaton.from_transitions(PAIRS, []).allowed(0, tokens).tolist() == []
