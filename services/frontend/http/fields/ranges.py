"""Value ranges for the OpenAPI document; the checks themselves are elsewhere and give more specific errors.

Rules across fields are included where JSON Schema can express them. Constraints that depend on the model (context,
vocabulary, task) are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.services.frontend.input_processor.pooling.pooling import MOST_DIMENSIONS
from quire.services.frontend.input_processor.sampling import sampling_rules as rules
from quire.services.frontend.request.scalar_parameters import SCALAR_PARAMETERS

Schema = dict[str, Any]

PRIORITY_BOUND = 2**31
TEXT_TO_READ: Schema = {"minLength": 1, "items": {"minLength": 1}}
TOKEN_IDS: Schema = {"items": {"minimum": 0}}
AT_LEAST_ONE: Schema = {"minimum": 1}
SEED: Schema = {"minimum": -rules.SEED_BOUND, "maximum": rules.SEED_BOUND - 1}
DIMENSIONS: Schema = {"minimum": 1, "maximum": MOST_DIMENSIONS}
LOGPROBS: Schema = {"minimum": rules.WHOLE_VOCABULARY}

# Field name -> keywords, for all bodies. A keyword for one JSON type does not restrict values of other types.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    **{parameter.name: parameter.schema for parameter in SCALAR_PARAMETERS},
    "allowed_token_ids": TOKEN_IDS,
    "bad_words": {"items": {"minLength": 1}, "maxItems": rules.MAX_BAD_WORDS},
    "chat_template": {
        "type": ["string", "null"],
        "pattern": "^[A-Za-z0-9_.-]{0,64}$",
    },  # name of one of the model's templates
    "dimensions": DIMENSIONS,
    "guided_choice": {"minItems": 1, "items": {"minLength": 1}},
    "input_ids": {"minItems": 1},
    "logit_bias": {"propertyNames": {"pattern": "^[0-9]+$"}},
    "logprob_token_ids": {**TOKEN_IDS, "maxItems": rules.MAX_LOGPROB_TOKEN_IDS},
    "logprobs": LOGPROBS,
    "max_completion_tokens": AT_LEAST_ONE,
    "max_new_tokens": AT_LEAST_ONE,
    "max_output_tokens": AT_LEAST_ONE,
    "min_new_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0},
    "n": {"minimum": 1, "maximum": rules.MAX_SAMPLES},
    "output_dimension": DIMENSIONS,
    "priority": {"minimum": -PRIORITY_BOUND, "maximum": PRIORITY_BOUND - 1},
    "prompt_logprob_start": {"minimum": 0},
    "prompt_logprobs": LOGPROBS,
    "num_predict": {"minimum": -2, "not": {"const": 0}},
    "sampling_seed": SEED,
    "seed": SEED,
    "stop": TEXT_TO_READ,
    "stop_sequences": {"items": {"minLength": 1}},
    "stop_token_ids": TOKEN_IDS,
    "temperature": {"minimum": 0, "maximum": 2},
    "text": TEXT_TO_READ,
    "thinking_token_budget": {"minimum": rules.UNBOUNDED, "maximum": rules.MAX_BUDGET},
    "token_ids_logprob": TOKEN_IDS,
    "tokens": TOKEN_IDS,
    "truncate_prompt_tokens": {"not": {"const": 0}},
}


def describe(schemas: Iterable[Schema]) -> None:
    """Adds the documented ranges of known fields to these schemas, in place; keywords that a schema has already
    stay."""
    for schema in schemas:
        for name, field in schema.get("properties", {}).items():
            for keyword, value in FIELDS.get(name, {}).items():
                present = field.setdefault(keyword, value)
                if keyword == "items":
                    field[keyword] = {**value, **present}


def given(name: str) -> Schema:
    """Returns the schema of an object in which the field is present and not null."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def exactly_one(*names: str) -> Schema:
    """Returns the schema of an object with exactly one of these fields."""
    return {"oneOf": [given(name) for name in names]}


def needs(name: str, value: Schema, other: str, wanted: Schema) -> Schema:
    """Returns the schema of an object in which field `name` matching `value` requires field `other` to match
    `wanted`."""
    return {
        "if": {"required": [name], "properties": {name: value}},
        "then": {"required": [other], "properties": {other: wanted}},
    }
