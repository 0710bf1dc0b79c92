"""Schemas that users sent to other servers, which ignored a part of them, failed, or answered something else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLMEngine, SamplingParams, StructuredOutput
from quire.shared.errors import QuireError

SHORT = {"type": "string", "maxLength": 6}
CLASSES = {
    "C": {"properties": {"payload": {"$ref": "#/$defs/A"}}, "required": ["payload"], "type": "object"},
    "A": {"properties": {"payload": {"$ref": "#/$defs/E"}}, "required": ["payload"], "type": "object"},
    "E": {"type": "boolean"},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "vllm#45592": {  # a pattern switched the bound of the length off
        "type": "array",
        "items": {"type": "string", "pattern": "^[a-z ]+$", "minLength": 1, "maxLength": 8},
        "minItems": 2,
        "maxItems": 2,
    },
    "vllm#15236": {  # an enum by reference, and a list of another
        "$defs": {"CarType": {"enum": ["sedan", "SUV", "Truck", "Coupe"], "title": "CarType", "type": "string"}},
        "properties": {
            "brand": {"title": "Brand", **SHORT},
            "car_type": {"$ref": "#/$defs/CarType"},
            "car_type2": {"items": {"enum": ["sedan", "suv"], "type": "string"}, "maxItems": 3, "type": "array"},
        },
        "required": ["brand", "car_type", "car_type2"],
        "type": "object",
    },
    "vllm#12201": {  # two names were asked for, four came
        "properties": {"names": {"items": SHORT, "minItems": 2, "maxItems": 2, "type": "array"}},
        "required": ["names"],
        "type": "object",
    },
    "vllm#12028": {
        "properties": {
            "location": SHORT,
            "animals_seen": {"maximum": 5, "minimum": 1, "type": "integer"},
            "animals": {"items": SHORT, "maxItems": 2, "type": "array"},
        },
        "required": ["location", "animals_seen", "animals"],
        "type": "object",
    },
    "ollama#8444": {  # definitions in another order than they refer to each other
        "$defs": CLASSES,
        "properties": {"c": {"$ref": "#/$defs/C"}, "a": {"$ref": "#/$defs/A"}},
        "required": ["c", "a"],
        "type": "object",
    },
    "ollama#8444, the other order": {
        "$defs": dict(reversed(CLASSES.items())),
        "properties": {"c": {"$ref": "#/$defs/C"}, "a": {"$ref": "#/$defs/A"}},
        "required": ["c", "a"],
        "type": "object",
    },
    "llama.cpp#13116": {
        "properties": {"colours": {"items": {"type": "string"}, "maxItems": 0, "type": "array"}},
        "required": ["colours"],
        "type": "object",
    },
    "guidance PR 982": {  # pydantic's discriminated unions
        "$defs": {
            "Cat": {
                "properties": {"kind": {"const": "cat"}, "lives": {"enum": [7, 9]}},
                "required": ["kind", "lives"],
                "type": "object",
            },
            "Dog": {
                "properties": {"kind": {"const": "dog"}, "name": SHORT},
                "required": ["kind", "name"],
                "type": "object",
            },
        },
        "properties": {
            "pet": {
                "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
                "oneOf": [
                    {"$ref": "#/$defs/Cat"},
                    {"$ref": "#/$defs/Dog"},
                ],
            }
        },
        "required": ["pet"],
        "type": "object",
    },
    "hermes-agent PR 67349": {  # dates of a server of tools
        "properties": {"due": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}( \d{2}:\d{2})?$"}},
        "required": ["due"],
        "type": "object",
    },
    "llama.cpp PR 6555": {"items": {"enum": [1, 22, 333]}, "minItems": 10, "maxItems": 20, "type": "array"},
    "llama.cpp#3081": {  # a list of items, as drafts before 2020-12 have it
        "type": "array",
        "items": [{"type": "object", "properties": {"name": SHORT}, "required": ["name"]}, {"type": "boolean"}],
        "minItems": 2,
        "additionalItems": False,
    },
    "hindsight PR 1292": {  # Optional, const and a reference next to a description
        "$defs": {"Mood": {"enum": ["good", "bad"]}},
        "properties": {
            "version": {"const": 2},
            "mood": {"anyOf": [{"$ref": "#/$defs/Mood"}, {"type": "null"}], "default": None},
            "why": {"$ref": "#/$defs/Mood", "description": "a reason"},
        },
        "required": ["version", "mood", "why"],
        "type": "object",
    },
    "vllm#15554": {
        "properties": {
            "type": {"enum": ["Example interaction type 1", "Example interaction type 2"], "type": "string"},
            "explanation": {"anyOf": [SHORT, {"type": "null"}], "default": None},
        },
        "required": ["type"],
        "type": "object",
    },
}


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with LLMEngine(threads=1, num_blocks=600, dtype="float32", max_num_seqs=16) as made:
        yield made


def closed(schema: Any) -> Any:
    """Returns the schema without additional members: a model this small never ends with them."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) if key != "discriminator" else value for key, value in schema.items()}
    return {**inner, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else inner


@pytest.mark.parametrize("source", SCHEMAS)
def test_every_part_of_a_schema_holds(source: str, engine: LLMEngine) -> None:
    schema = closed(SCHEMAS[source])
    form = StructuredOutput(json=schema, disable_any_whitespace=True)
    sampling = SamplingParams(max_tokens=400, temperature=1.0, seed=3, n=4, structured_output=form)
    (found,) = engine.generate(["Answer as JSON: "], sampling)
    for output in found.outputs:
        assert output.finish_reason == "stop", output.text
        is_older = isinstance(schema.get("items"), list)
        jsonschema.validate(json.loads(output.text), schema, jsonschema.Draft7Validator if is_older else None)


def test_properties_come_in_the_order_of_the_schema(engine: LLMEngine) -> None:
    """ollama#7978, ollama#8003: reasons were to be written before the answer, and came after it."""
    names = ["reasoning", "answer", "because", "aside"]
    schema = {"type": "object", "properties": dict.fromkeys(names, SHORT), "required": sorted(names)}
    sampling = SamplingParams(max_tokens=200, seed=1, structured_output=StructuredOutput(json=closed(schema)))
    (found,) = engine.generate(["Answer as JSON: "], sampling)
    assert list(json.loads(found.text)) == names


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array", "items": {"$ref": "#/$defs/BlockSchema"}}, r"\$defs/BlockSchema"),  # marker#984
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),  # vllm PR 42904
        ({"type": "string", "pattern": "^hello\\!($"}, "pattern|regex"),  # llama.cpp#19051
    ],
)
def test_an_unsupported_schema_is_refused_by_name(schema: dict[str, Any], text: str, engine: LLMEngine) -> None:
    sampling = SamplingParams(max_tokens=20, structured_output=StructuredOutput(json=schema))
    with pytest.raises(QuireError, match=text):
        engine.add_request("refused", "x", sampling)
