"""lm-format-enforcer (MIT): character parsers in Python, walked along a trie of the vocabulary's tokens.

Tokens that are not a whole number of characters are never allowed.
"""

from __future__ import annotations

import contextlib
import copyreg
import pickle
import re
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from interegular.fsm import anything_else
from lmformatenforcer import (
    CharacterLevelParser,
    CharacterLevelParserConfig,
    JsonSchemaParser,
    RegexParser,
)
from lmformatenforcer.tokenizerprefixtree import TokenizerPrefixTree, TokenizerPrefixTreeNode

from quire.services.worker.structured.backends.automaton_masks import Automaton, CharacterColumns
from quire.services.worker.structured.backends.format_enforcer_parsers import (
    advance_text,
    count_leading_space,
    is_complete,
    is_free_text,
    is_plain_text,
    next_characters,
    remaining_characters,
)
from quire.services.worker.structured.backends.grammar_library import SequentialFiller, rewrite_subschemas, schema_of
from quire.services.worker.structured.backends.vocabulary import ModelVocabulary, words_of
from quire.shared.columns import I32
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output import regex
from quire.shared.structured_output.backends import LM_FORMAT_ENFORCER
from quire.shared.structured_output.checks import values_of

copyreg.pickle(type(anything_else), lambda _: "anything_else")  # a singleton; automata are unpickled from a subprocess
ANY = {"anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null", "object", "array")]}
MAX_WHITESPACE = 9  # between two parts of a JSON text: a new line and four levels of indentation
CONTROL = re.compile(r"[\x00-\x09\x0b\x0c\x0e-\x1f]")
QUOTED = '"\\'  # characters that end a JSON string or start an escape in it
MAX_WALK_STEPS = 100_000  # per mask, a character of a token each: about 0.3 s
MAX_PATTERNS = 1000  # regular expressions of JSON Schemas that the library caches
MAX_KEPT_MASKS = 1000  # cached per grammar


class TokenTrie:
    """Trie of the vocabulary's tokens by characters, with masks of free JSON text; leaves out tokens that are not valid
    UTF-8."""

    def __init__(self, vocabulary: ModelVocabulary, *, for_json: bool) -> None:
        """`for_json`: leaves out tokens with control characters that a JSON string may not contain unescaped. Line ends
        stay: the library handles them."""
        self.num_words = vocabulary.num_words
        self.texts: dict[int, str] = {}
        for token_id, spelled in enumerate(vocabulary.texts):
            with contextlib.suppress(UnicodeDecodeError):
                text = spelled.decode()
                if text and not (for_json and CONTROL.search(text)):
                    self.texts[token_id] = text
        regular = [(token_id, text, False) for token_id, text in self.texts.items()]
        tree = TokenizerPrefixTree(regular, False, vocabulary.size)
        self.root: TokenizerPrefixTreeNode = tree.root
        self.alphabet = "".join(character for character in self.root.children if not (for_json and character in "\r\n"))
        self.plain = frozenset(self.alphabet) - {*QUOTED}  # characters that need no escape in a JSON string
        self._free_texts = tree.json_freetext_tokens
        self._free_masks: dict[tuple[int, int], I32] = {}

    @cached_property
    def columns(self) -> CharacterColumns:
        return CharacterColumns(self.texts)

    def automaton(self, parser: RegexParser) -> Automaton:
        """Returns the parser's automaton, for walking all tokens at once: character by character in Python, a mask over
        150,000 tokens takes 0.4 s."""
        fsm, alphabet = parser.context.pattern, {*self.alphabet}
        others = fsm.alphabet[anything_else] if anything_else in fsm.alphabet else None  # noqa: SIM401 - its get() differs

        def symbol(character: str) -> int | None:
            """Returns the automaton's symbol of a character, None if no token of a text may contain it."""
            if character in fsm.alphabet:
                return int(fsm.alphabet[character])
            return others if character in alphabet else None

        symbols = [symbol(character) for character in self.columns.characters]
        return Automaton.from_transitions(fsm.map, symbols)

    def free_text(self, length: int, least: int, most: int) -> I32:
        """Returns the mask of tokens that may continue a JSON string of any text, cached. `length`: characters so far;
        `least`, `most`: the string's minimum and maximum length."""
        longest = self._free_texts.max_token_len
        bounds = min(longest, max(0, least - length)), min(longest, most - length)
        if bounds not in self._free_masks:
            allowed = self._free_texts.lookup_allowed_tokens(*bounds).allowed_tokens
            self._free_masks[bounds] = words_of(allowed, self.num_words)
        return self._free_masks[bounds]


class FormatEnforcerMatcher:
    """Matcher of one sequence; keeps a parser state per accepted token, so that it can roll back."""

    library = LM_FORMAT_ENFORCER

    def __init__(
        self,
        parser: CharacterLevelParser,
        tokens: TokenTrie,
        masks: dict[Hashable, I32],
        automaton: Automaton | None,
    ) -> None:
        """`masks`: cache by state, for states that the library can name; `automaton`: of a regular expression, else
        None."""
        self._parser = parser
        self._automaton = automaton
        self._before: list[CharacterLevelParser] = []
        self._tokens = tokens
        self._masks = masks
        self.fault = ""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advances by tokens as far as the parser allows their characters; returns how many. Earlier states are kept
        for rollback()."""
        for count, token_id in enumerate(token_ids):
            after = self._after(token_id)
            if after is None:
                return count
            self._before.append(self._parser)
            self._parser = after
        return len(token_ids)

    def accept_sampled(self, token_id: int) -> bool:
        return self.accept([token_id]) == 1

    def rollback(self, count: int) -> None:
        """Returns to the parser state before the last `count` tokens."""
        if count:
            self._parser = self._before[-count]
            del self._before[-count:]

    def forced_tokens(self) -> list[int]:
        """Returns nothing: one text may be spelled by several tokens, so that there is a choice."""
        return []

    @property
    def can_end(self) -> bool:
        return bool(self._parser.can_end())

    def fill(self, mask: I32) -> None:
        """Writes the allowed tokens into `mask`; if the library raises, sets `fault` and allows nothing."""
        try:
            self._fill(mask)
        except Exception as error:  # the library reads some parts of a schema only when a text gets there
            self.fault = f"lm-format-enforcer: {error or type(error).__name__}"
            mask[:] = 0

    def _fill(self, mask: I32) -> None:
        """Copies the mask of the current parser state, computed once per state that the library can name."""
        key = self._parser.cache_key()
        known = None if key is None else self._masks.get(key)
        if known is None:
            known = self._mask()
            if key is not None and len(self._masks) < MAX_KEPT_MASKS:
                self._masks[key] = known
        mask[:] = known

    def _after(self, token_id: int) -> CharacterLevelParser | None:
        """Returns the parser after a token, None if it is not allowed or spells nothing."""
        text = self._tokens.texts.get(token_id, "")
        return advance_text(self._parser, text) if text else None

    def _mask(self) -> I32:
        """Computes the mask: with the automaton of a regular expression, or from the mask of free text inside of a JSON
        string, or by walking the trie."""
        if self._automaton is not None:
            allowed = self._automaton.allowed(self._parser.current_state, self._tokens.columns)
            return words_of(allowed, self._tokens.num_words)
        if is_complete(self._parser):
            return words_of([], self._tokens.num_words)
        shortcut = self._parser.shortcut_key()
        if not isinstance(shortcut, tuple) or not is_free_text(shortcut):
            return words_of(list(self._walk(None)), self._tokens.num_words)
        free_text = self._tokens.free_text(*shortcut[1:])
        if '"' not in next_characters(self._parser):  # the string is too short to end
            return free_text
        return free_text | words_of(list(self._walk('"')), self._tokens.num_words)

    def _walk(self, only: str | None) -> Iterator[int]:
        """Yields the ids of tokens that the parser allows, walking the trie; `only`: restricts them to those that start
        with this character. Sets `fault` and ends early after MAX_WALK_STEPS."""
        rest: list[tuple[CharacterLevelParser, TokenizerPrefixTreeNode, str | None]] = []
        rest.append((self._parser, self._tokens.root, only))
        num_steps = 0
        while rest:
            parser, node, first = rest.pop()
            if first is None and node is not self._tokens.root and is_plain_text(parser):
                yield from self._walk_text(parser, node, rest)
                continue
            yield from node.tokens
            if is_complete(parser):
                continue
            allowed = node.children.keys() & set(next_characters(parser) if first is None else first)
            num_steps += len(allowed)
            if num_steps > MAX_WALK_STEPS:
                self.fault = f"a mask takes more than {MAX_WALK_STEPS} steps"
                return
            for character in allowed:
                rest.append(
                    (count_leading_space(parser.add_character(character), character), node.children[character], None)
                )

    def _walk_text(self, parser: CharacterLevelParser, node: TokenizerPrefixTreeNode, rest: list[Any]) -> Iterator[int]:
        """Yields the tokens that continue a JSON string, asking the parser only for characters that end it or start an
        escape: each of its answers lists all 18,000 characters of a large vocabulary. Adds to `rest` where those
        characters lead."""
        max_length = remaining_characters(parser)
        texts = [("", node)]
        while texts:
            text, node = texts.pop()
            yield from node.tokens
            for character, child in node.children.items():
                if character in QUOTED:
                    after = advance_text(parser, text + character)
                    if after is not None:
                        rest.append((after, child, None))
                elif len(text) < max_length and character in self._tokens.plain:
                    texts.append((text + character, child))


class FormatEnforcerGrammar:
    """Compiled grammar with a mask cache that its sequences share. The library's JSON parsers are stateful, so that
    each sequence gets its own."""

    def __init__(self, constraint: pb.StructuredOutput, parser: RegexParser | None, tokens: TokenTrie) -> None:
        self._schema = None if parser else _schema(constraint)
        self._parser = parser
        self._tokens = tokens
        self._masks: dict[Hashable, I32] = {}
        self._automaton = tokens.automaton(parser) if parser else None
        self.num_bytes = MAX_KEPT_MASKS * tokens.num_words * 4 if parser else 0  # once the cache is full

    def new_matcher(self) -> FormatEnforcerMatcher:
        """Returns a matcher at the grammar's start: with the shared parser of a regular expression, or a new JSON
        parser."""
        parser = self._parser or json_parser(self._schema, self._tokens.alphabet)
        return FormatEnforcerMatcher(parser, self._tokens, self._masks, self._automaton)


class FormatEnforcer:
    """Library adapter: regular expressions are compiled, everything else is parsed while it is followed."""

    def __init__(self, vocabulary: ModelVocabulary) -> None:
        self._vocabulary = vocabulary

    @cached_property
    def _tokens(self) -> TokenTrie:
        return TokenTrie(self._vocabulary, for_json=False)

    @cached_property
    def _json_tokens(self) -> TokenTrie:
        return TokenTrie(self._vocabulary, for_json=True)

    def compile(self, constraint: pb.StructuredOutput) -> bytes:
        """Compiles and pickles regular expressions: the constraint's own, or the patterns of its schema. Raises for a
        schema that the library refuses, or with a name that tokens cannot spell."""
        match constraint.WhichOneof("constraint"):
            case "regex":
                return pickle.dumps(self._regex(regex.whole(constraint.regex)))
            case "choice":
                return pickle.dumps(self._regex("|".join(map(regex.escape, constraint.choice.options))))
            case _:
                schema = _schema(constraint)
                self._check_spelling(schema)
                patterns = {pattern: self._regex(pattern) for pattern in values_of(schema, "pattern")}
                json_parser(schema, self._json_tokens.alphabet).get_allowed_characters()
                return pickle.dumps(patterns)

    def _check_spelling(self, schema: Any) -> None:
        """Raises ValueError for a name or value with a character that only several tokens spell together: it could
        never be completed."""
        texts = [name for names in values_of(schema, "properties") if isinstance(names, dict) for name in names]
        texts += [value for values in values_of(schema, "enum") if isinstance(values, list) for value in values]
        texts += values_of(schema, "const")
        unspelled = {*"".join(text for text in texts if isinstance(text, str))} - {*self._json_tokens.alphabet}
        if unspelled:
            raise ValueError(f"not supported: {min(unspelled)!r} in a name or a value, which no single token spells")

    def load(self, constraint: pb.StructuredOutput, compiled: bytes) -> FormatEnforcerGrammar:
        """Unpickles the compiled expressions; those of a schema go into the library's process-wide cache, which is
        emptied if it is full."""
        loaded = pickle.loads(compiled)
        if isinstance(loaded, RegexParser):
            return FormatEnforcerGrammar(constraint, loaded, self._tokens)
        kept = JsonSchemaParser._Context.regex_parser_cache
        if len(kept) > MAX_PATTERNS:
            kept.clear()
        kept.update(loaded)
        return FormatEnforcerGrammar(constraint, None, self._json_tokens)

    def filler(self) -> SequentialFiller:
        return SequentialFiller()

    def _regex(self, pattern: str) -> RegexParser:
        """Compiles a pattern over the vocabulary's alphabet, without states that can never match."""
        parser = RegexParser(pattern, CharacterLevelParserConfig(alphabet=self._tokens.alphabet))
        _prune_dead_states(parser.context.pattern.map, parser.context.pattern.finals)
        return parser


def _prune_dead_states(map_: dict[int, dict[int, int]], finals: Iterable[int]) -> None:
    """Removes transitions to states from which no final state is reachable, in place; look-aheads leave some."""
    before: dict[int, list[int]] = {}
    for state, following in map_.items():
        for after in following.values():
            before.setdefault(after, []).append(state)
    alive, rest = set(finals), list(finals)
    while rest:
        new = [state for state in before.get(rest.pop(), ()) if state not in alive]
        alive.update(new)
        rest += new
    for state, following in map_.items():
        map_[state] = {symbol: after for symbol, after in following.items() if after in alive}


def _schema(constraint: pb.StructuredOutput) -> Any:
    """Returns the constraint's JSON schema, rewritten to forms that the library supports."""
    return rewrite_subschemas(schema_of(constraint), _adapt_schema)


def _adapt_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Rewrites one schema to forms that the library supports: oneOf becomes anyOf, a list of types alternatives,
    missing item types any value. Changes and returns `schema`, or returns a new one."""
    if "oneOf" in schema:  # contains objects only
        schema["anyOf"] = schema.pop("oneOf")
    if isinstance(kinds := schema.get("type"), list):  # the library would apply the other keywords to none of the types
        return {"anyOf": [_adapt_schema({**schema, "type": kind}) for kind in kinds]}
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = regex.whole(pattern)
    for key in ("items", "additionalProperties"):
        if schema.get(key) is True or schema.get(key) == {}:
            schema[key] = ANY
    properties = schema.get("properties")
    if properties:
        schema["properties"] = {name: ANY if inner in (True, {}) else inner for name, inner in properties.items()}
    return schema


def json_parser(schema: Any, alphabet: str) -> JsonSchemaParser:
    """Creates a JSON parser for `schema` with any field order, bounded whitespace and unbounded arrays. Raises the
    library's error for an unsupported schema."""
    config = CharacterLevelParserConfig(
        alphabet=alphabet,
        max_consecutive_whitespaces=MAX_WHITESPACE,
        force_json_field_order=False,
        max_json_array_length=sys.maxsize,
    )
    return JsonSchemaParser(schema, config)
