"""outlines-core (Apache-2.0): compiles a regular expression to a complete automaton over the vocabulary."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import outlines_core
from outlines_core.json_schema import build_regex_from_schema

from quire.services.worker.structured.backends.grammar_library import SequentialFiller, rewrite_subschemas, schema_of
from quire.services.worker.structured.backends.vocabulary import MASK_BITS, ModelVocabulary, bit
from quire.shared.columns import I32
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output import regex
from quire.shared.structured_output.backends import OUTLINES_CORE
from quire.shared.structured_output.json_rule import WHITESPACE

MAX_ROLLBACK = 64  # tokens, the maximum of drafts
NO_WHITESPACE = ""
# Appended to each valid text, and spelled by no token of the model: without it the library allows no token that leads
# from a state where a text may end to one where it may not, so that "1" could not become "1.5". Tokens that begin a
# character of that plane are left out.
END = "\U0010ffff"
BEGIN = "\U0010fffe"  # precedes each text: see _anchored()
FIRST_BYTE = END.encode()[:1]  # the same for BEGIN
WORD_BYTES = 4


class OutlinesMatcher:
    """Matcher of one sequence: a state of the index, which the library's guide tracks; rolls back up to MAX_ROLLBACK
    tokens."""

    library = OUTLINES_CORE
    fault = ""  # masks are rows of a table and cannot fail

    def __init__(self, index: outlines_core.Index, vocabulary: ModelVocabulary) -> None:
        self._index = index
        self._guide = outlines_core.Guide(index, MAX_ROLLBACK)
        self._vocabulary = vocabulary
        self._end = end_id(vocabulary)
        self._words = np.zeros(begin_id(vocabulary) // MASK_BITS + 1, dtype=np.int32)
        self._guide.advance(begin_id(vocabulary), return_tokens=False)

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advances by tokens as far as the index has a transition; returns how many."""
        for count, token_id in enumerate(token_ids):
            if self._index.get_next_state(self._guide.get_state(), token_id) is None:
                return count
            self._guide.advance(token_id, return_tokens=False)
        return len(token_ids)

    def accept_sampled(self, token_id: int) -> bool:
        return self.accept([token_id]) == 1

    def rollback(self, count: int) -> None:
        if count:
            self._guide.rollback_state(count)

    def forced_tokens(self) -> list[int]:
        """Returns nothing: one text may be spelled by several tokens, so that there is a choice."""
        return []

    @property
    def can_end(self) -> bool:
        """Whether END, which follows each complete text, leads from the current state to a final one."""
        after = self._index.get_next_state(self._guide.get_state(), self._end)
        return after is not None and bool(self._index.is_final_state(after))

    def fill(self, mask: I32) -> None:
        """Copies the state's row of the index into `mask`, without the tokens BEGIN and END, which the model does not
        have."""
        words = self._words
        words[:] = 0
        self._guide.write_mask_into(words.ctypes.data, words.size, WORD_BYTES)
        mask[:] = words[: len(mask)]
        if self._end // MASK_BITS < len(mask):
            mask[self._end // MASK_BITS] &= ~bit(self._end)


class OutlinesGrammar:
    """Compiled automaton, shared by all sequences of a constraint."""

    def __init__(self, index: outlines_core.Index, num_bytes: int, vocabulary: ModelVocabulary) -> None:
        self._index = index
        self.num_bytes = num_bytes
        self._vocabulary = vocabulary

    def new_matcher(self) -> OutlinesMatcher:
        return OutlinesMatcher(self._index, self._vocabulary)


class Outlines:
    """Library adapter for regular expressions, choices, and JSON schemas, which the library converts to a regular
    expression."""

    def __init__(self, vocabulary: ModelVocabulary) -> None:
        self._vocabulary = vocabulary

    def compile(self, constraint: pb.StructuredOutput) -> bytes:
        """Builds and pickles the index of the constraint over all tokens; raises the library's error for a constraint
        that it cannot convert."""
        end = end_id(self._vocabulary)
        by_text = {END.encode(): [end], BEGIN.encode(): [begin_id(self._vocabulary)]}
        for token_id, text in enumerate(self._vocabulary.texts):
            if text and FIRST_BYTE not in text:
                by_text.setdefault(text, []).append(token_id)
        vocabulary = outlines_core.Vocabulary(end_of_text_id(self._vocabulary), by_text)
        index = outlines_core.Index(_anchored(_pattern(constraint)), vocabulary)
        return pickle.dumps(index)

    def load(self, constraint: pb.StructuredOutput, compiled: bytes) -> OutlinesGrammar:
        return OutlinesGrammar(pickle.loads(compiled), len(compiled), self._vocabulary)

    def filler(self) -> SequentialFiller:
        return SequentialFiller()


def _anchored(pattern: str) -> str:
    """Returns an expression that matches the pattern between BEGIN and END, or the empty text.

    The library builds its automaton for searches, which may begin at any byte of a text: states for all of these
    together make it ten times as slow. The empty match comes second and ends every search where it begins. The
    automaton reports a match one byte late, which is inside of BEGIN.
    """
    return f"{BEGIN}({pattern}){END}|"


def _pattern(constraint: pb.StructuredOutput) -> str:
    """Returns the regular expression of a constraint: the given one, the options of a choice, or one that spells the
    JSON schema with the requested whitespace."""
    match constraint.WhichOneof("constraint"):
        case "regex":
            return regex.whole(constraint.regex)
        case "choice":
            return "|".join(map(regex.escape, constraint.choice.options))
        case _:
            schema = json.dumps(rewrite_subschemas(schema_of(constraint), _anchor_pattern), ensure_ascii=False)
            space = constraint.whitespace_pattern or WHITESPACE + "?"
            blank = NO_WHITESPACE if constraint.disable_any_whitespace else space
            return str(build_regex_from_schema(schema, blank))


def _anchor_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    """Anchors the pattern, which the library inserts between quotation marks unchanged."""
    pattern = schema.get("pattern")
    return schema if pattern is None else {**schema, "pattern": f"^({regex.whole(pattern)})$"}


def end_id(vocabulary: ModelVocabulary) -> int:
    """Returns the token id of END."""
    return vocabulary.size


def end_of_text_id(vocabulary: ModelVocabulary) -> int:
    """Token id with which the library itself ends texts; it is never sampled."""
    return vocabulary.size + 1


def begin_id(vocabulary: ModelVocabulary) -> int:
    """Returns the token id of BEGIN."""
    return vocabulary.size + 2
