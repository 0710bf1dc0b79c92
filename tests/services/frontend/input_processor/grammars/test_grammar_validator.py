"""Tests of hostile and impossible constraints: each is refused soon, and the next one is checked as usual."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire.services.frontend.input_processor.grammars import grammar_process, grammar_validator
from quire.services.frontend.input_processor.grammars.grammar_validator import GrammarCompiler, GrammarValidator
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output.literals import SpecialTokens
from tests.priorities import has_stepped_back
from tests.waiting import eventually, is_reaped, loop_turns

FINE = pb.StructuredOutput(json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}}')
PRIMES = (101, 103, 107, 109, 113)
rng = random.Random(0)


def word() -> str:
    return "".join(rng.choices("abcdefghijklmnop", k=12))


def schema(value: Any) -> dict[str, str]:
    return {"json_schema": json.dumps(value)}


def ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def fan(depth: int, kind: str) -> dict[str, Any]:
    """Returns a schema in which each definition refers to the next one twice: 2 ** depth paths."""
    bodies = {f"d{i}": {kind: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**bodies, f"d{depth}": {"type": "object"}}}


HOSTILE: dict[str, dict[str, Any]] = {
    "a reference to itself": schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "references in a circle": schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [ref("b")]}, "b": {"anyOf": [ref("a")]}}}
    ),
    "a reference to nowhere": schema({"$ref": "#/$defs/nowhere"}),
    "a reference to the net": schema({"$ref": "http://example.com/schema.json"}),
    "nested far too deep": {"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000},
    "a million choices": {"choice": pb.StructuredOutput.Choice(options=["x"] * 1_000_000)},
    "more ways than can be followed": {"grammar": "start: " + " | ".join(f'"{word()}"' for _ in range(4000))},
    "more keys than fit": schema({"properties": {word(): {} for _ in range(20_000)}, "type": "object"}),
    "thousands of keys in any order": schema({"properties": {word(): {} for _ in range(6500)}, "type": "object"}),
    "all of any of": schema(
        {"allOf": [{"anyOf": [{"properties": {word(): {}}, "type": "object"} for _ in range(8)]} for _ in range(9)]}
    ),
    "a common multiple of primes": schema({"allOf": [{"type": "integer", "multipleOf": prime} for prime in PRIMES]}),
    "patterns without a common text": schema(
        {"allOf": [{"type": "string", "pattern": f"^(a{{{prime}}})+$"} for prime in PRIMES]}
    ),
    "an intersection of long cycles": {
        "grammar": "start: T\nT: /b/ | (" + " & ".join(f"/(a{{{prime}}})+/" for prime in PRIMES) + ")"
    },
    "look-behind": {"regex": "(?<=a)b"},
    "a regular expression nested deep": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "a terminal made of itself": {"grammar": "start: A\nA: B\nB: A"},
    "a rule made of itself": {"grammar": "start: start"},
    "doubling forty times": {
        "grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "a"'
    },
    "tens of thousands of rules": {"grammar": "start: " + " | ".join(f"r{i}" for i in range(9000)) + "\n"
        + "".join(f'r{i}: "{i}"\n' for i in range(9000))},
}  # fmt: skip

# Constraints that look as bad but are harmless, since grammars are parsed lazily.
HARMLESS: dict[str, dict[str, Any]] = {
    "catastrophic backtracking": {"regex": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    "exponential as an automaton": {"regex": "(a|b)*a(a|b){25}"},
    "a text of a billion": schema({"type": "string", "minLength": 10**9}),
    "a million items": schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}),
    "an ambiguous grammar": {"grammar": 'start: s\ns: s s s | s s | "a" | "aa"'},
    "two ways, thirty times": schema(fan(30, "anyOf")),
    "the same, thirty times": schema(fan(30, "allOf")),
}


SPECIALS = SpecialTokens({"<|end|>": 7})
SLOW_LANE_CPU_S = 1.5


@pytest.fixture(scope="module")
def validator() -> Iterator[GrammarValidator]:
    opened = GrammarValidator(SPECIALS, 4096, slow_lane_cpu_s=SLOW_LANE_CPU_S)
    yield opened
    opened.close()


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_constraints_are_refused(validator: GrammarValidator, name: str) -> None:
    constraint = pb.StructuredOutput(**HOSTILE[name])
    with pytest.raises(InvalidArgument) as refusal:
        await validator.check(constraint)
    assert refusal.value.field == "structured_output"
    assert len(refusal.value.message) < 700
    await validator.check(FINE)


@pytest.mark.parametrize("name", HARMLESS)
async def test_constraints_that_only_look_hostile_are_accepted(validator: GrammarValidator, name: str) -> None:
    await validator.check(pb.StructuredOutput(**HARMLESS[name]))


async def test_other_grammars_are_checked_during_a_long_check() -> None:
    slow = pb.StructuredOutput(regex="slow+")
    asked, proceed = threading.Event(), threading.Event()

    class WaitsWithSlow(GrammarCompiler):
        def verdict(self, message: bytes, cpu_limit_s: float) -> str:
            if message == grammar_process.encode_constraint(slow, ()):
                asked.set()
                proceed.wait(60)
            return super().verdict(message, cpu_limit_s)

    with contextlib.closing(GrammarValidator(SPECIALS, 4096, compiler=WaitsWithSlow)) as validator:
        checked = asyncio.ensure_future(validator.check(slow))
        await asyncio.to_thread(asked.wait, 60)
        for number in range(10):
            await validator.check(pb.StructuredOutput(regex=f"a{number}+"))
        assert not checked.done()
        proceed.set()
        await checked


async def test_slow_constraints_delay_only_slow_constraints() -> None:
    tried, proceed = list[bytes](), threading.Event()

    class Scripted(GrammarCompiler):
        def verdict(self, message: bytes, cpu_limit_s: float) -> str:
            tried.append(message)
            if b"long" in message:
                proceed.wait(60)
                raise grammar_validator.CompileTimeout
            return ""

    with contextlib.closing(GrammarValidator(SPECIALS, 4096, compiler=Scripted)) as validator:
        many = [asyncio.ensure_future(validator.check(pb.StructuredOutput(regex=f"long{n}"))) for n in range(20)]
        await eventually(lambda: len(tried) >= grammar_validator.NUM_FAST_COMPILERS)
        other = asyncio.ensure_future(validator.check(pb.StructuredOutput(regex="other")))
        await loop_turns()
        proceed.set()
        await other
        refused = await asyncio.gather(*many, return_exceptions=True)
    assert all(isinstance(refusal, InvalidArgument) for refusal in refused)
    assert [b"other" in message for message in tried].index(True) <= 2 * grammar_validator.NUM_FAST_COMPILERS + 1


async def test_the_limit_is_processor_time_at_low_priority(validator: GrammarValidator) -> None:
    """Checks that a busy machine accepts the same constraints as an idle one."""
    await validator.check(pb.StructuredOutput(regex="first"))
    stopped = validator.pids
    assert stopped
    assert all(map(has_stepped_back, stopped))
    checked = asyncio.ensure_future(validator.check(pb.StructuredOutput(regex="second")))
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(2 * SLOW_LANE_CPU_S)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    await checked


async def test_a_killed_process_is_replaced(validator: GrammarValidator) -> None:
    await validator.check(pb.StructuredOutput(regex="before"))
    assert validator.pids
    for pid in validator.pids:
        os.kill(pid, signal.SIGKILL)
        await eventually(functools.partial(is_reaped, pid))
    await validator.check(pb.StructuredOutput(regex="after"))


async def test_tokens_that_the_model_has_may_be_named(validator: GrammarValidator) -> None:
    await validator.check(pb.StructuredOutput(grammar='start: "x" <|end|> "y"'))
    with pytest.raises(InvalidArgument, match="unknown special token"):
        await validator.check(pb.StructuredOutput(grammar='start: "x" <|nothing|> "y"'))


async def test_features_that_the_workers_libraries_lack_are_refused_by_name(validator: GrammarValidator) -> None:
    """Checks that the result is cached for these libraries only."""
    lark, looks = pb.StructuredOutput(grammar='start: "x"'), pb.StructuredOutput(regex="((?!ab)[ab])+")
    with pytest.raises(InvalidArgument, match="structured_output_backend: xgrammar does not support grammars in Lark"):
        await validator.check(lark, ("xgrammar",))
    await validator.check(lark, ("xgrammar", "llguidance"))
    await validator.check(lark)
    with pytest.raises(InvalidArgument, match="look-ahead inside a repetition is not supported"):
        await validator.check(looks)
    await validator.check(looks, ("llguidance", "lm-format-enforcer"))
    with pytest.raises(InvalidArgument, match="outlines-core does not enforce 'minimum'"):
        await validator.check(pb.StructuredOutput(json_schema='{"type": "integer", "minimum": 2}'), ("outlines-core",))


async def test_constraints_that_no_library_offers_are_refused_with_each_librarys_reason(
    validator: GrammarValidator,
) -> None:
    unique = pb.StructuredOutput(json_schema='{"type": "array", "uniqueItems": true}')
    with pytest.raises(
        InvalidArgument, match="backend: llguidance cannot compile it: failed to compile JSON schema: Un"
    ):
        await validator.check(unique, ("llguidance", "xgrammar"))


EVERY = ("llguidance", "xgrammar", "outlines-core", "lm-format-enforcer")
SCORE = {"type": "object", "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["score"], "additionalProperties": False}  # fmt: skip
ONLY_ITSELF = {
    "$ref": "#/$defs/n",
    "$defs": {"n": {"type": "object", "properties": {"c": ref("n")}, "required": ["c"]}},
}
TAG = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": ONLY_ITSELF},
    "end": "</call>",
}


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (schema(ONLY_ITSELF), "#/$defs/n/properties/c requires another #/$defs/n"),  # vllm-project/vllm#57788
        ({"structural_tag": json.dumps({"format": TAG})}, "#/$defs/n/properties/c requires another #/$defs/n"),
        (schema({**SCORE, "patternProperties": {"^(sc|to)ore$": {"type": "string"}}}), "required property 'score'"),
        ({"grammar": 'start: "ab" (T | U)\nT: /c[^\\x00-\\x{10FFFF}]/\nU: "d" T'}, ""),
    ],
)
async def test_unsatisfiable_constraints_are_refused_before_the_first_token(
    validator: GrammarValidator, constraint: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        await validator.check(pb.StructuredOutput(**constraint), EVERY)
    assert reason in refusal.value.message


async def test_a_grammar_with_a_dead_end_is_refused_with_the_text_before_it(validator: GrammarValidator) -> None:
    """Checks a schema in which the library, after `score`, requires another matching name that does not exist."""
    dying = {**SCORE, "patternProperties": {"^sc(ore)$": {"type": "integer"}}}
    with pytest.raises(InvalidArgument, match=r"""after '\{"score" ?: .*, ' no continuation is allowed"""):
        await validator.check(pb.StructuredOutput(**schema(dying)), EVERY)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (schema({"type": "string", "pattern": "(?<=a)b"}), "xgrammar requires 'pattern' to be anchored"),
        ({"regex": r"(a)\1"}, "lm-format-enforcer does not support"),
        ({"regex": r"a\Z"}, "unrecognized escape sequence"),
        (schema({"type": "array", "uniqueItems": True}), "outlines-core does not enforce 'uniqueItems'"),
        (schema({"not": {"type": "null"}}), "lm-format-enforcer does not enforce 'not'"),
    ],
)
async def test_constraints_that_all_libraries_reject_are_refused_with_each_librarys_reason(
    validator: GrammarValidator, constraint: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        await validator.check(pb.StructuredOutput(**constraint), EVERY)
    assert reason in refusal.value.message
    assert "\n" not in refusal.value.message


async def test_constraints_that_llguidance_lacks_are_left_to_other_libraries(validator: GrammarValidator) -> None:
    names = pb.StructuredOutput(**schema({"type": "object", "propertyNames": {"minLength": 3}}))
    with pytest.raises(InvalidArgument, match="propertyNames"):
        await validator.check(names)
    await validator.check(names, EVERY)
    await validator.check(names, ("xgrammar",))


async def test_the_text_of_a_grammar_is_in_no_refusal(validator: GrammarValidator) -> None:
    """Checks the constraint of a strict tool together with free text."""
    tag = {**TAG, "content": {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}}}
    tags = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag]}
    with pytest.raises(InvalidArgument) as refusal:
        await validator.check(pb.StructuredOutput(structural_tag=json.dumps({"format": tags})))
    assert "uniqueItems" in refusal.value.message
    assert "TEXT" not in refusal.value.message
    assert "|" not in refusal.value.message
