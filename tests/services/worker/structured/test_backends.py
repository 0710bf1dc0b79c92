"""Every grammar library on the same constraints: texts that its masks allow fulfil the constraint, and unsupported
constraints are refused by name."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from quire.services.worker.structured.backends import backend_selection
from quire.services.worker.structured.backends.backend_selection import open_backend
from quire.services.worker.structured.backends.compile_child import DEFAULT_LIMITS, SubprocessLimits
from quire.services.worker.structured.backends.llguidance_backend import LLGuidanceBackend
from quire.services.worker.structured.bench.features import FEATURES
from quire.services.worker.structured.port import GrammarBackend, Matcher
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output import backends
from quire.shared.structured_output.backends import LLGUIDANCE, LM_FORMAT_ENFORCER, OUTLINES_CORE, XGRAMMAR
from tests.services.worker.rig import Rig
from tests.services.worker.structured.grammar_rig import PERSON, TINY, admit, hot, prepare, run, text

LIBRARIES = (LLGUIDANCE, XGRAMMAR, OUTLINES_CORE, LM_FORMAT_ENFORCER)
OTHERS = LIBRARIES[1:]
NUM_WORDS = 4096 // 32
SPACES = re.compile(r".*\s")  # tokens that lm-format-enforcer allows in fewer places than their characters
Holds = Callable[[str], Any]

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "b c"]},
        "sizes": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
        "maybe": {"type": ["boolean", "null"]},
    },
    "required": ["name", "kind", "sizes", "code", "maybe"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
            "required": ["children"],
            "additionalProperties": False,
        }
    },
}
SUMS = 'root ::= term (" + " term)*\nterm ::= [1-9][0-9]? | "(" root ")"'
CALL = {"begin": "[call]", "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}}, "end": "[end]"}
TAGS = {"format": {"type": "triggered_tags", "triggers": ["[call]"], "tags": [CALL], "stop_after_first": True,
                   "at_least_one": True}}  # fmt: skip


def is_record(said: str) -> bool:
    value = json.loads(said)
    return (
        value.keys() == RECORD["properties"].keys()
        and len(value["name"]) <= 6
        and value["kind"] in ("a", "b c")
        and 1 <= len(value["sizes"]) <= 3
        and re.fullmatch("[A-Z]{2}-[0-9]{1,3}", value["code"]) is not None
        and value["maybe"] in (True, False, None)
    )


def is_tree(said: str) -> bool:
    def is_node(value: Any) -> bool:
        return value.keys() == {"children"} and len(value["children"]) <= 2 and all(map(is_node, value["children"]))

    return is_node(json.loads(said))


FORMS: dict[str, tuple[dict[str, Any], Holds]] = {
    "a record": ({"json_schema": json.dumps(RECORD)}, is_record),
    "a record without spaces": (
        {"json_schema": json.dumps(RECORD), "disable_any_whitespace": True},
        lambda said: is_record(said) and not re.search(r"\s", re.sub(r'"([^"\\]|\\.)*"', "", said)),
    ),
    "a tree": ({"json_schema": json.dumps(TREE)}, is_tree),
    "a pattern": ({"regex": r"^(\d{2}|x)-[a-f]{3,5}$"}, re.compile("([0-9]{2}|x)-[a-f]{3,5}").fullmatch),
    "a choice": ({"choice": {"options": ["x.y", 'say "hi"', "[z]"]}}, ("x.y", 'say "hi"', "[z]").__contains__),
    "a grammar": ({"grammar": SUMS}, lambda said: re.fullmatch(r"[\d() +]+", said) and eval(said) >= 0),
    "tags": (
        {"structural_tag": json.dumps(TAGS)},
        lambda said: re.search(r"\[call\](1|2)\[end\]$", said) and said.count("[call]") == 1,
    ),
}
REFUSED_FORMS = {
    (OUTLINES_CORE, "a grammar"),
    (OUTLINES_CORE, "tags"),
    (LM_FORMAT_ENFORCER, "a grammar"),
    (LM_FORMAT_ENFORCER, "tags"),
    (LM_FORMAT_ENFORCER, "a record without spaces"),
}


@cache
def backend(library: str) -> GrammarBackend:
    return open_backend(library, TINY, 4096, [0])


def mask_of(library: str, matcher: Matcher) -> I32:
    mask = np.zeros((1, NUM_WORDS), dtype=np.int32)
    filler_of(library).fill([matcher], [0], mask)
    assert matcher.fault == ""
    return mask[0]


@cache
def filler_of(library: str) -> Any:
    return backend(library).filler()


def allowed(mask: I32) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def walk(library: str, constraint: pb.StructuredOutput, seed: int) -> Iterator[int]:
    """Yields random allowed tokens, ends where possible, and takes drafts back at each step."""
    rng = random.Random(seed)
    matcher = backend(library).compile(constraint).new_matcher()
    while True:
        mask = mask_of(library, matcher)
        choices = allowed(mask)
        if matcher.can_end and (not choices or rng.random() < 0.5):
            return
        token = rng.choice(choices)
        assert matcher.accept([token]) == 1
        ahead = allowed(mask_of(library, matcher))
        if ahead:
            assert matcher.accept([rng.choice(ahead)]) == 1
            matcher.rollback(1)
        matcher.rollback(1)
        assert (mask_of(library, matcher) == mask).all()
        assert matcher.accept([token]) == 1
        yield token


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("form", FORMS)
def test_allowed_texts_fulfil_the_constraint(library: str, form: str, tokenizer: Tokenizer) -> None:
    values, holds = FORMS[form]
    constraint = pb.StructuredOutput(**values)
    if (library, form) in REFUSED_FORMS:
        with pytest.raises(InvalidArgument, match=f"structured_output_backend: {library} takes no"):
            backend(library).compile(constraint)
        return
    for seed in range(2):
        tokens = [*zip(walk(library, constraint, seed), range(300), strict=False)]
        if len(tokens) < 300:  # else a number or a text does not end
            said = tokenizer.decode([token for token, _ in tokens], skip_special_tokens=False)
            assert holds(said), said


@pytest.mark.parametrize("library", OTHERS)
def test_disallowed_tokens_are_not_accepted(library: str, tokenizer: Tokenizer) -> None:
    matcher = backend(library).compile(pb.StructuredOutput(regex="[0-9]+(,[0-9]+)?")).new_matcher()
    digits, letter = tokenizer.encode("47").ids, tokenizer.encode("a").ids
    assert matcher.accept([*digits, *letter]) == len(digits)
    assert matcher.can_end
    assert filler_of(library).accept([matcher], letter) == [False]
    assert matcher.accept(tokenizer.encode(",").ids) == 1, "a complete text may be continued"
    assert not matcher.can_end
    assert matcher.accept(tokenizer.encode("5").ids) == 1
    assert matcher.can_end


@pytest.mark.slow
@pytest.mark.parametrize("library", OTHERS)
def test_sequences_under_a_library_in_a_worker(library: str, tokenizer: Tokenizer) -> None:
    """Runs sequences together at a high temperature with seeds, and migrates one in the middle of its output."""
    rig = Rig(TINY, num_blocks=512, block_size=16, attention_backend="auto", structured_output_backend=library)
    schema = {**PERSON, "properties": {**PERSON["properties"], "age": {"enum": [3, 5]}}}  # type: ignore[dict-item]
    name, digits = prepare(rig, json_schema=json.dumps(schema)), prepare(rig, regex=r"\d{3}")
    new = [admit(tokenizer, slot, name if slot else digits, sampling=hot(slot)) for slot in range(4)]
    said = run(rig, new, steps=400)
    assert re.fullmatch(r"\d{3}", text(tokenizer, said[0]))
    for slot in range(1, 4):
        assert json.loads(text(tokenizer, said[slot]))["age"] in (3, 5)
    rig.step(released=[0, 1, 2, 3])
    cut = len(said[2]) // 2
    rest = run(rig, [admit(tokenizer, 2, name, output=said[2][:cut], sampling=hot(2))], steps=400)[2]
    assert said[2][:cut] + rest == said[2]


CANNOT: dict[str, dict[str, Any]] = {
    "does not enforce 'minimum'": {OUTLINES_CORE: {"type": "integer", "minimum": 3}, LM_FORMAT_ENFORCER: ...},
    "does not enforce 'uniqueItems'": {XGRAMMAR: {"type": "array", "uniqueItems": True}, OUTLINES_CORE: ...},
    "does not support a 'pattern' that could match characters that JSON escapes": {
        OUTLINES_CORE: {"type": "string", "pattern": "^.+$"}
    },
    "does not enforce 'format'": {LM_FORMAT_ENFORCER: {"items": {"type": "string", "format": "uri"}}},
    "does not support 'enum' of different types": {LM_FORMAT_ENFORCER: {"enum": [1, "a"]}},
    "does not support schemas without a type": {OUTLINES_CORE: {"type": "object", "properties": {"a": {}}}},
    "does not enforce keywords next to '$ref'": {XGRAMMAR: {"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 2}},
}  # fmt: skip


@pytest.mark.parametrize("reason", CANNOT)
def test_keywords_that_a_library_ignores_are_refused(reason: str) -> None:
    schema: Any = None
    for library, asked in CANNOT[reason].items():
        schema = schema if asked is ... else asked
        with pytest.raises(InvalidArgument) as refusal:
            backend(library).compile(pb.StructuredOutput(json_schema=json.dumps(schema)))
        assert refusal.value.message == f"structured_output: structured_output_backend: {library} {reason}"


def test_auto_uses_llguidance_and_falls_back_to_the_first_that_supports_a_constraint() -> None:
    assert backend_selection.library_names("auto") == LIBRARIES
    assert backend_selection.library_names("outlines") == (OUTLINES_CORE,)
    either = open_backend("auto", TINY, 4096, [0])
    usual = either.compile(pb.StructuredOutput(regex="[ab]{2}")).new_matcher()
    looking = either.compile(pb.StructuredOutput(regex="(?:(?!ab)[ab]{2}){1}")).new_matcher()
    assert (usual.library, looking.library) == (LLGUIDANCE, LM_FORMAT_ENFORCER)
    masks, filler = np.zeros((3, NUM_WORDS), dtype=np.int32), either.filler()
    tokens = [*map(Tokenizer.from_file(str(TINY / "tokenizer.json")).token_to_id, "ab")]
    assert filler.accept([usual, looking], [tokens[0], tokens[0]]) == [True, True]
    filler.fill([looking, usual], [2, 0], masks)
    assert allowed(masks[0]) == tokens
    assert allowed(masks[1]) == []
    assert allowed(masks[2]) == tokens[:1]


def test_a_library_that_is_not_installed_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_selection.libraries, "is_installed", lambda name: name == XGRAMMAR)
    assert backend_selection.library_names("auto") == (LLGUIDANCE, XGRAMMAR)
    with pytest.raises(InvalidArgument, match="structured_output_backend: lm-format-enforcer is not installed"):
        Rig(TINY, structured_output_backend=LM_FORMAT_ENFORCER)


def test_grammar_drafts_need_a_library_that_finds_forced_tokens(tokenizer: Tokenizer) -> None:
    drafting = '{"method": "grammar", "num_speculative_tokens": 16}'
    with pytest.raises(
        InvalidArgument, match="structured_output_backend: outlines-core cannot determine forced tokens"
    ):
        Rig(TINY, structured_output_backend="outlines-core", speculative_config=drafting)
    matcher = backend(XGRAMMAR).compile(pb.StructuredOutput(regex="one of a long text [ab]")).new_matcher()
    forced = matcher.forced_tokens()
    assert len(forced) > 3
    assert "one of a long text ".startswith(tokenizer.decode(forced))


@pytest.mark.slow
@pytest.mark.parametrize("library", OTHERS)
def test_keywords_that_no_library_enforces_are_refused(library: str, tokenizer: Tokenizer) -> None:
    """All libraries treat oneOf as anyOf."""
    for feature in FEATURES:
        constraint = pb.StructuredOutput(json_schema=json.dumps(feature.schema))
        if feature.name == "oneOf, overlapping" or backends.cannot(library, constraint):
            continue
        grammar = backend(library).compile(constraint)
        for value in feature.wrong:
            tokens, matcher = tokenizer.encode(json.dumps(value)).ids, grammar.new_matcher()
            assert matcher.accept(tokens) < len(tokens) or not matcher.can_end, (feature.name, value)


@pytest.mark.parametrize(
    ("library", "bound"),
    [
        (OUTLINES_CORE, "8 s"),
        pytest.param(OUTLINES_CORE, "16 MiB", marks=pytest.mark.slow),
        pytest.param(LM_FORMAT_ENFORCER, "8 s", marks=pytest.mark.slow),
        pytest.param(LM_FORMAT_ENFORCER, "16 MiB", marks=pytest.mark.slow),
    ],
)
def test_an_exploding_grammar_ends_its_subprocess_only(library: str, bound: str) -> None:
    """llguidance supports it, because it follows automata lazily."""
    bomb = pb.StructuredOutput(regex="(a|b)*a(a|b){25}")
    assert LLGuidanceBackend(TINY, 4096, [0]).compile(bomb)
    limits = SubprocessLimits(seconds=0.5) if bound == "8 s" else SubprocessLimits(60.0, 16 << 20)
    careful = open_backend(library, TINY, 4096, [0], limits)
    with pytest.raises(InvalidArgument, match=library):
        careful.compile(bomb)
    assert careful.compile(pb.StructuredOutput(regex="[ab]{3}"))


def test_compiling_any_object_stays_within_the_time_limit(tokenizer: Tokenizer) -> None:
    """Allows a quarter of the limit: a compiling subprocess has low priority on a busy machine."""
    limits = SubprocessLimits(DEFAULT_LIMITS.seconds / 4)
    grammar = open_backend(OUTLINES_CORE, TINY, 4096, [0], limits).compile(pb.StructuredOutput(json_object=True))
    for said, ends in (('{"a": {"b": [1, "x"]}}', True), ("{}", True), ('{"a": 1', False), ("[1]", False)):
        tokens, matcher = tokenizer.encode(said).ids, grammar.new_matcher()
        assert (matcher.accept(tokens) == len(tokens) and matcher.can_end) == ends


@pytest.mark.parametrize(
    ("pattern", "fits", "wrong"),
    [
        ("a|ab", ("a", "ab"), ("", "b", "aba")),
        ("a?", ("", "a"), ("aa", "b")),
        (r"\{.*\}", ("{}", "{{}", "{é🙂}"), ("{", "x{}", "")),
        ("(ab)*", ("", "ab", "abab"), ("a", "ba")),
        ("[0-9]{2}|x", ("12", "x"), ("1", "123", "xx")),
    ],
)
def test_outlines_automata_match_whole_texts(
    pattern: str, fits: tuple[str, ...], wrong: tuple[str, ...], tokenizer: Tokenizer
) -> None:
    grammar = backend(OUTLINES_CORE).compile(pb.StructuredOutput(regex=pattern))
    for said in (*fits, *wrong):
        tokens, matcher = tokenizer.encode(said).ids, grammar.new_matcher()
        is_whole = matcher.accept(tokens) == len(tokens) and matcher.can_end
        assert is_whole == (said in fits), said
    began = grammar.new_matcher()
    first = tokenizer.encode(fits[-1]).ids
    taken = began.accept(first)
    began.rollback(taken)
    assert began.accept(first) == len(first), "rollback returns to the start"


def test_masks_inside_of_json_strings_equal_walks_of_single_tokens(tokenizer: Tokenizer) -> None:
    """Covers text without escapes, which is walked without the library, and automata of regular expressions."""
    constraints = [
        pb.StructuredOutput(
            json_schema='{"items": {"type": "string", "minLength": 2, "maxLength": 4}, "type": "array"}'
        ),
        pb.StructuredOutput(json_object=True),
        pb.StructuredOutput(regex=r"(?=.*\d)[a-z ]{2,5}[^x]{0,3}"),
    ]
    for constraint in constraints:
        grammar = backend(LM_FORMAT_ENFORCER).compile(constraint)
        for beginning in ("", '["', '["a', '["abc', '{"', '{"a": "x', "ab", "a 1"):
            matcher = grammar.new_matcher()
            ids = tokenizer.encode(beginning).ids if beginning else []
            if matcher.accept(ids) < len(ids):
                continue
            found = set(allowed(mask_of(LM_FORMAT_ENFORCER, matcher)))
            for token_id in range(256, 4096, 5):
                taken = matcher.accept([token_id]) == 1
                assert taken or token_id not in found, (beginning, tokenizer.decode([token_id]))
                assert not taken or token_id in found or SPACES.match(tokenizer.decode([token_id])), beginning
                matcher.rollback(taken)
