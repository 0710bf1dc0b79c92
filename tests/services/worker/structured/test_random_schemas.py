"""Random schemas and samples for every grammar library: outputs are JSON and fulfil the schema, or the library refuses
the schema by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from quire.shared.structured_output import backends
from quire.shared.structured_output.backends import LM_FORMAT_ENFORCER, OUTLINES_CORE, XGRAMMAR
from tests.services.worker.structured.test_backends import LIBRARIES, allowed, backend, mask_of

Json = dict[str, Any]
NAMES = ("a", "b", "c d", "é", "name")
PATTERNS = ("^[a-c]+$", r"^\d{2}-x?$", "^(yes|no)$", "b", "^a", "[0-9]$", '^[^"]{2}$')
FORMATS = ("date", "time", "date-time", "uuid", "email", "uri", "ipv4", "hostname")
VALUES = (["a", "b"], ['x"y', "z\\"], [1, 2, 10], [1, "a", None], [True], ["é", "\n"], [1.5, 2])
MAX_TOKENS = 150  # per sample; longer ones are inconclusive
CLOSING = frozenset(('"', "}", "]", ",", '":', '"}', '",'))
CLOSES = 0.6  # probability of choosing a closing token, so that most samples end


def schema(chance: random.Random, depth: int = 0) -> Json:
    kinds: list[Callable[[random.Random, int], Json]] = [text, number, listed, marked]
    if depth < 2:
        kinds += [record, record, array, options]
    return chance.choice(kinds)(chance, depth + 1)


def record(chance: random.Random, depth: int) -> Json:
    names = chance.sample(NAMES, chance.randrange(1, 4))
    made: Json = {"type": "object", "properties": {name: schema(chance, depth) for name in names}}
    required = [name for name in names if chance.random() < 0.6]
    if chance.random() < 0.2:
        required.append("extra")
    elif chance.random() < 0.6:
        made["additionalProperties"] = chance.choice([False, {"type": "integer"}])
    return {**made, "required": required} if required else made


def array(chance: random.Random, depth: int) -> Json:
    least = chance.randrange(3)
    return {"type": "array", "items": schema(chance, depth), "minItems": least, "maxItems": least + chance.randrange(3)}


def options(chance: random.Random, depth: int) -> Json:
    return {"anyOf": [schema(chance, depth) for _ in range(2)]}


def text(chance: random.Random, depth: int) -> Json:
    least = chance.randrange(3)
    kind = chance.choice(["string", ["string", "null"]])
    return {"type": kind, "minLength": least, "maxLength": least + chance.randrange(4)}


def number(chance: random.Random, depth: int) -> Json:
    least = chance.randrange(-20, 20)
    bounds = chance.choice([{}, {"minimum": least}, {"minimum": least, "maximum": least + chance.randrange(300)}])
    return {"type": chance.choice(["integer", "number"]), **bounds}


def listed(chance: random.Random, depth: int) -> Json:
    return chance.choice([{"enum": chance.choice(VALUES)}, {"const": chance.choice(["a", 'q"', 3, None, False])}])


def marked(chance: random.Random, depth: int) -> Json:
    kinds = {"pattern": chance.choice(PATTERNS), "format": chance.choice(FORMATS)}
    key = chance.choice([*kinds])
    return {"type": "string", key: kinds[key]}


def sample(library: str, asked: Json, seed: int, tokenizer: Tokenizer) -> str | None:
    """Returns a random text that the library's masks allow; None if it does not end within MAX_TOKENS."""
    chance, ids = random.Random(seed), list[int]()
    matcher = backend(library).compile(pb.StructuredOutput(json_schema=json.dumps(asked))).new_matcher()
    for _ in range(MAX_TOKENS):
        choices = allowed(mask_of(library, matcher))
        if matcher.can_end and (not choices or chance.random() < 0.5):
            return tokenizer.decode(ids, skip_special_tokens=False)
        assert choices, f"nothing may follow {tokenizer.decode(ids)!r} under {asked}"
        closing = [token for token in choices if tokenizer.decode([token]) in CLOSING]
        ids.append(chance.choice(closing if closing and chance.random() < CLOSES else choices))
        assert matcher.accept_sampled(ids[-1]), (
            f"{tokenizer.decode(ids)!r} ends in a token that the mask allows and the matcher does not"
        )
    return None


def check(library: str, asked: Json, tokenizer: Tokenizer, num_samples: int = 3) -> bool:
    """Returns whether the library accepts the schema."""
    try:
        said = [sample(library, asked, seed, tokenizer) for seed in range(num_samples)]
    except InvalidArgument:
        return False
    for one in said:
        if one is not None:
            jsonschema.validate(json.loads(one), asked)
    return True


EXTRA = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b", "extra"]}
NESTED = {"type": "array", "items": EXTRA, "minItems": 1, "maxItems": 2}
# Schemas by the library that once produced invalid output for them.
ONCE_WRONG: list[tuple[str, Json, bool]] = [
    (XGRAMMAR, EXTRA, True),
    (XGRAMMAR, NESTED, True),
    (XGRAMMAR, {**EXTRA, "additionalProperties": {"type": "integer", "minimum": 3}}, True),
    (XGRAMMAR, {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}}, True),
    (XGRAMMAR, {"type": "string", "pattern": '^[^"]{2}$'}, False),
    (LM_FORMAT_ENFORCER, EXTRA, True),
    (OUTLINES_CORE, EXTRA, False),
    (OUTLINES_CORE, {**EXTRA, "additionalProperties": {"type": "boolean"}}, False),
    *((OUTLINES_CORE, {"type": "string", "format": name}, False) for name in ("time", "email", "uri")),
    (LM_FORMAT_ENFORCER, {"type": ["string", "null"], "maxLength": 2}, True),
    (LM_FORMAT_ENFORCER, {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 2}}, True),
    (LM_FORMAT_ENFORCER, {"type": "object", "properties": {"a": {"enum": ["x"]}, "b": {"type": "boolean"}}}, True),
    (LM_FORMAT_ENFORCER, {"type": "array", "items": {"type": "integer"}, "maxItems": 0}, False),
    (LM_FORMAT_ENFORCER, {"type": "string", "maxLength": 0}, False),
    (LM_FORMAT_ENFORCER, {"type": "object", "properties": {"é": {"type": "boolean"}}}, False),
    (LM_FORMAT_ENFORCER, {"anyOf": [{"type": "array", "items": {"type": kind}} for kind in ("string", "null")]}, False),
]


@pytest.mark.parametrize(("library", "asked", "is_taken"), ONCE_WRONG)
def test_schemas_with_past_errors_are_fulfilled_or_refused(
    library: str, asked: Json, is_taken: bool, tokenizer: Tokenizer
) -> None:
    assert check(library, asked, tokenizer, 12) == is_taken


@pytest.mark.parametrize("asked", [asked for library, asked, is_taken in ONCE_WRONG if not is_taken])
def test_auto_uses_another_library_for_refused_schemas(asked: Json, tokenizer: Tokenizer) -> None:
    constraint = pb.StructuredOutput(json_schema=json.dumps(asked))
    name, _, _ = backends.choose(constraint, LIBRARIES, lambda name: backend(name).compile(constraint))
    assert check(name, asked, tokenizer)


@pytest.mark.parametrize("library", LIBRARIES)
def test_random_schemas_are_fulfilled_or_refused(library: str, tokenizer: Tokenizer) -> None:
    """Runs twelve of the schemas of test_many_random_schemas_are_fulfilled_or_refused."""
    assert sum(check(library, schema(random.Random(seed)), tokenizer) for seed in range(12)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_many_random_schemas_are_fulfilled_or_refused(library: str, tokenizer: Tokenizer) -> None:
    num_taken = sum(check(library, schema(random.Random(seed)), tokenizer) for seed in range(12, 120))
    assert num_taken > 10
