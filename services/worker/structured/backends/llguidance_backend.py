"""llguidance (MIT): parses grammars lazily while they are followed, so that compiling takes next to no time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits

from quire.services.worker.structured.backends.vocabulary import MASK_BITS, ModelVocabulary, bit
from quire.shared import structured_output
from quire.shared.columns import I32
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.structured_output.backends import LLGUIDANCE

# Limits of one step of one sequence, in the library's units of work: at the limits a mask over 150,000 tokens takes up
# to 40 ms. Usual grammars stay under 2 ms.
STEP_ITEMS = 10_000
STEP_LEXER_FUEL = 100_000
LEXER_STATES = 20_000  # per grammar, shared by its sequences: 1 to 2 KB each
NO_LOGS = 0
REFUSES = "doesn't satisfy the grammar"  # the library's error about a token, not about a limit

# Slices of the vocabulary that are allowed as a whole where every matching text is. The library's defaults end at 10,
# 30 and any number of characters; near the end of a bounded JSON string it checks longer tokens one by one: with 28
# characters left a mask over Qwen's 151,643 tokens takes 0.1 ms with these and 0.3 with the defaults, with 8 left 0.8
# and 1.5 ms.
SPACES, CHARACTER = r"[\x20\x0A\x0D\x09]+", r'[^"\\\x00-\x1F\x7F]'
SLICES = [SPACES, *(f"{CHARACTER}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 15, 20, 30)), f"{CHARACTER}+"]


class LLGuidanceMatcher:
    """Matcher of one sequence over llguidance's."""

    library = LLGUIDANCE

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    def accept(self, token_ids: Sequence[int]) -> int:
        return self.inner.try_consume_tokens(list(token_ids))

    def accept_sampled(self, token_id: int) -> bool:
        """Consumes a sampled token; False if the library refuses it. Keeps the library's error for `fault`, which
        accept() drops."""
        return bool(self.inner.consume_token(token_id))

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)

    def forced_tokens(self) -> list[int]:
        return self.inner.compute_ff_tokens()

    @property
    def can_end(self) -> bool:
        return self.inner.is_accepting()

    @property
    def fault(self) -> str:
        """The library's error, mostly an exceeded limit; empty if there is none or it only refused a token."""
        reason = self.inner.get_error() if self.inner.is_error() else ""
        return "" if REFUSES in reason else reason


class LLGuidanceGrammar:
    """Compiled grammar: a matcher that never moves and is copied for each sequence."""

    num_bytes = 0

    def __init__(self, pristine: LLMatcher) -> None:
        self._pristine = pristine

    def new_matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._pristine.deep_copy())


class LLGuidanceFiller:
    """Mask filler that uses the library's thread pool for several matchers."""

    def __init__(self, ends: Sequence[int]) -> None:
        """`ends`: tokens that the library allows where a text may end."""
        self._ends = ends
        self._executor = LLExecutor()

    def accept(self, matchers: Sequence[Any], token_ids: Sequence[int]) -> list[bool]:
        """Advances each matcher by its token in the library's thread pool; returns which were accepted."""
        pairs = [(matcher.inner, token_id) for matcher, token_id in zip(matchers, token_ids, strict=True)]
        return list(self._executor.consume_token_par(pairs))

    def fill(self, matchers: Sequence[Any], places: Sequence[int], masks: I32) -> None:
        """Writes the matchers' masks into rows `places` of `masks`, which must be contiguous, and clears the bits of
        end tokens; a single mask in the caller's thread."""
        assert masks.flags.c_contiguous
        num_bytes = masks.strides[0]
        if len(matchers) == 1:
            matchers[0].inner.unsafe_compute_mask_ptr(masks[places[0]].ctypes.data, num_bytes)
        else:
            entries = [(matcher.inner, place) for matcher, place in zip(matchers, places, strict=True)]
            self._executor.unsafe_compute_mask_ptr(entries, masks.ctypes.data, num_bytes, len(masks))
        for token_id in self._ends:
            masks[places, token_id // MASK_BITS] &= ~bit(token_id)


class LLGuidanceBackend:
    """Grammar backend over the vocabulary of tokenizer.json; compiles in the caller's thread."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary = ModelVocabulary.read(folder, vocab_size, eos_token_ids, SLICES)
        self._limits = LLParserLimits(
            step_max_items=STEP_ITEMS,
            step_lexer_fuel=STEP_LEXER_FUEL,
            max_lexer_states=LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, constraint: sampling_pb2.StructuredOutput) -> LLGuidanceGrammar:
        """Compiles the constraint to a pristine matcher and computes its first mask, which finds unsatisfiable
        grammars. Raises InvalidArgument for an invalid constraint or a library error."""
        structured_output.check(constraint)
        grammar = LLMatcher.grammar_from_lark(structured_output.lark(constraint, self._vocabulary.specials))
        matcher = LLMatcher(self._vocabulary.tokenizer, grammar, log_level=NO_LOGS, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # detects unsatisfiable grammars, and prepares the first mask
        if matcher.is_error():
            raise structured_output.compile_refusal(matcher.get_error())
        return LLGuidanceGrammar(matcher)

    def filler(self) -> LLGuidanceFiller:
        return LLGuidanceFiller(self._vocabulary.ends)
