"""xgrammar (Apache-2.0): pushdown automata whose context-independent masks are computed when a grammar is compiled."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import xgrammar

from quire.services.worker.structured.backends.grammar_library import schema_text
from quire.services.worker.structured.backends.vocabulary import MASK_BITS, ModelVocabulary, bit
from quire.shared.columns import I32
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output import regex
from quire.shared.structured_output.backends import XGRAMMAR
from quire.shared.structured_output.checks import MAX_NESTING_OF_TAGS, parse
from quire.shared.structured_output.literals import quoted
from quire.shared.structured_output.structural_tag import as_format

NUM_THREADS = min(8, max(1, (os.cpu_count() or 1) // 2))  # of the mask filler
COMPACT = (",", ":")
JSON_KINDS = ("json_schema", "json_object")
CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")
# Characters between two parts of a JSON text: a new line and four levels of indentation. Without a limit a model may
# fill its answer with whitespace.
MAX_WHITESPACE = 9


class XGrammarMatcher:
    """Matcher of one sequence over xgrammar's."""

    library = XGRAMMAR
    fault = ""  # the library has no limits that it could exceed

    def __init__(self, inner: xgrammar.GrammarMatcher, tokenizer: Any) -> None:
        self.inner = inner
        self._tokenizer = tokenizer

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advances by tokens as far as the library accepts them; returns how many."""
        for count, token_id in enumerate(token_ids):
            if not self.inner.accept_token(token_id):
                return count
        return len(token_ids)

    def accept_sampled(self, token_id: int) -> bool:
        return self.accept([token_id]) == 1

    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count)

    def forced_tokens(self) -> list[int]:
        """Returns all but the last token of the forced text: the last one may be spelled together with what follows.
        Leaves the matcher where it was."""
        text = self.inner.find_jump_forward_string()
        tokens = self._tokenizer.tokenize_str(text)[:-1] if text else []
        num_accepted = self.accept(tokens)
        self.rollback(num_accepted)
        return list(tokens[:num_accepted])

    @property
    def can_end(self) -> bool:
        return bool(self.inner.is_completed())


class XGrammarGrammar:
    """Compiled grammar of xgrammar, shared by all sequences of a constraint."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: ModelVocabulary) -> None:
        self._compiled = compiled
        self.num_bytes = int(compiled.memory_size_bytes)
        self._vocabulary = vocabulary

    def new_matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary.tokenizer)


class XGrammarFiller:
    """Mask filler that uses the library's threads for several matchers."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=NUM_THREADS)

    def accept(self, matchers: Sequence[Any], token_ids: Sequence[int]) -> list[bool]:
        """Advances each matcher by its token in the library's threads; returns which were accepted."""
        accepted = self._batch.batch_accept_token([matcher.inner for matcher in matchers], list(token_ids))
        return [bool(is_right) for is_right in accepted]

    def fill(self, matchers: Sequence[Any], places: Sequence[int], masks: I32) -> None:
        """Writes the matchers' masks into rows `places` of `masks` and clears the bits of end tokens; a single mask in
        the caller's thread."""
        if len(matchers) == 1:
            matchers[0].inner.fill_next_token_bitmask(masks, places[0])
        else:
            self._batch.batch_fill_next_token_bitmask([matcher.inner for matcher in matchers], masks, list(places))
        for token_id in self._ends:
            masks[places, token_id // MASK_BITS] &= ~bit(token_id)


class XGrammar:
    """Library adapter over the vocabulary's texts; tokens that spell nothing are never allowed."""

    def __init__(self, vocabulary: ModelVocabulary) -> None:
        self._vocabulary = vocabulary

    def compile(self, constraint: pb.StructuredOutput) -> bytes:
        """Compiles the constraint with one thread and returns it as JSON; raises the library's error for one that it
        refuses."""
        compiler = xgrammar.GrammarCompiler(self._info_for(constraint), max_threads=1, cache_enabled=False)
        compiled: str = _compile(compiler, constraint).serialize_json()
        return compiled.encode()

    def load(self, constraint: pb.StructuredOutput, compiled: bytes) -> XGrammarGrammar:
        grammar = xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._info_for(constraint))
        return XGrammarGrammar(grammar, self._vocabulary)

    def filler(self) -> XGrammarFiller:
        return XGrammarFiller(self._vocabulary.ends)

    def _info_for(self, constraint: pb.StructuredOutput) -> xgrammar.TokenizerInfo:
        """Returns the vocabulary for the kind of constraint: JSON needs one without control characters."""
        return self._json_info if constraint.WhichOneof("constraint") in JSON_KINDS else self._info

    @cached_property
    def _info(self) -> xgrammar.TokenizerInfo:
        return self._tokenizer_info(self._vocabulary.texts)

    @cached_property
    def _json_info(self) -> xgrammar.TokenizerInfo:
        """Vocabulary for JSON constraints, without tokens that contain control characters other than the end of a line:
        in strings of bounded length the library would allow them unescaped, which is not JSON."""
        return self._tokenizer_info([b"" if CONTROL.search(text) else text for text in self._vocabulary.texts])

    def _tokenizer_info(self, texts: Sequence[bytes]) -> xgrammar.TokenizerInfo:
        """Returns the library's view of the vocabulary with these token texts."""
        return xgrammar.TokenizerInfo(
            texts,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=self._vocabulary.size,
            stop_token_ids=list(self._vocabulary.ends),
        )


def _compile(compiler: xgrammar.GrammarCompiler, constraint: pb.StructuredOutput) -> xgrammar.CompiledGrammar:
    """Calls the compiler's method for the kind of constraint: JSON, regular expression, choice, grammar (EBNF) or
    structural tag."""
    match constraint.WhichOneof("constraint"):
        case "json_schema" | "json_object":
            compact = constraint.disable_any_whitespace
            return compiler.compile_json_schema(
                schema_text(constraint),
                any_whitespace=not compact,
                separators=COMPACT if compact else None,
                strict_mode=False,
                max_whitespace_cnt=None if compact else MAX_WHITESPACE,
            )
        case "regex":
            return compiler.compile_regex(regex.whole(constraint.regex))
        case "choice":
            return compiler.compile_grammar(f"root ::= {' | '.join(map(quoted, constraint.choice.options))}")
        case "grammar":
            return compiler.compile_grammar(constraint.grammar)
        case _:
            tags = parse(constraint.structural_tag, "structural_tag", MAX_NESTING_OF_TAGS)
            return compiler.compile_structural_tag({"type": "structural_tag", "format": as_format(tags)})
