"""Token masks of an automaton over characters: all tokens of a vocabulary are walked together, a character per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


class CharacterColumns:
    """Token texts as columns of characters, the longest token first: column k holds the characters number k of all
    tokens with more than k characters."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        """Builds the columns of `texts`, which are non-empty and keyed by token id."""
        by_length = sorted(texts.items(), key=lambda item: -len(item[1]))
        self.token_ids = np.array([token_id for token_id, _ in by_length], dtype=np.int32)
        self.characters = sorted({character for text in texts.values() for character in text})
        places = {character: place for place, character in enumerate(self.characters)}
        longest = len(by_length[0][1]) if by_length else 0
        columns: list[list[int]] = [[] for _ in range(longest)]
        for _, text in by_length:
            for depth, character in enumerate(text):
                columns[depth].append(places[character])
        self.columns = [np.array(column, dtype=np.int32) for column in columns]  # indices into `characters`


@dataclass(frozen=True, slots=True)
class Automaton:
    """Deterministic automaton over character classes, [state, class] -> state; the last state is the dead one, from
    which no text can match."""

    transitions: Ints  # [num_states + 1, num_classes]
    classes: Ints  # [num_characters] class of each character of a CharacterColumns
    rows: Mapping[int, int]  # row by the library's state number

    @classmethod
    def from_transitions(cls, map_: Mapping[int, Mapping[int, int]], symbols: list[int | None]) -> Automaton:
        """Builds the tables. `map_`: state -> symbol -> state; `symbols`: the symbol of each character of a
        CharacterColumns, None if no state allows that character. Symbols that no character has are dropped."""
        states = {*map_, *(after for following in map_.values() for after in following.values())}
        rows = {state: row for row, state in enumerate(sorted(states))}
        places = {symbol: place for place, symbol in enumerate(sorted({s for s in symbols if s is not None}), start=1)}
        transitions = np.full((len(rows) + 1, len(places) + 1), len(rows), dtype=np.int32)
        for state, following in map_.items():
            for symbol, after in following.items():
                if symbol in places:
                    transitions[rows[state], places[symbol]] = rows[after]
        classes = np.array([0 if symbol is None else places[symbol] for symbol in symbols], dtype=np.int32)
        return cls(transitions, classes, rows)

    def allowed(self, state: int, tokens: CharacterColumns) -> Ints:
        """Returns the ids of tokens, in no order, that lead from the library's state number `state` to a state other
        than the dead one, so that a text may still match."""
        dead, finished = len(self.rows), []
        alive = np.arange(len(tokens.token_ids), dtype=np.int32)
        states = np.full(len(alive), self.rows.get(state, dead), dtype=np.int32)
        flat, num_classes = self.transitions.ravel(), self.transitions.shape[1]
        for column in tokens.columns:
            num_longer = int(np.searchsorted(alive, len(column)))
            finished.append(alive[num_longer:])
            alive, states = alive[:num_longer], states[:num_longer]
            classes = self.classes.take(column if num_longer == len(column) else column.take(alive))
            states = flat.take(states * num_classes + classes)
            is_alive = states != dead
            if not is_alive.all():
                alive, states = alive[is_alive], states[is_alive]
        return tokens.token_ids.take(np.concatenate([*finished, alive]))
