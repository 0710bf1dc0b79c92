"""A field missing in config.json has the default of transformers' class or is rejected by name: another default would
change every output without any tensor revealing it."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.encoders.encoder_config import EncoderConfig
from quire.services.worker.models.registry import check_config
from quire.services.worker.models.transformers_backend.transformers_config import TransformersConfig
from quire.shared.errors import InvalidArgument
from quire.shared.models.text_part import text_part
from tests.services.worker.checkpoints import FAMILIES, SHAPE
from tests.services.worker.models.test_text_parts import MODELS

# Names, fields derived from tensors, and layers used only by drafts, which transformers lacks.
NOT_COMPARED = ("architectures", "model_type", "dtype", "transformers_version", "num_nextn_predict_layers")


def plain(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def family_config(family: str) -> dict[str, Any]:
    prefix, changes = FAMILIES[family]
    head = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    architecture = prefix.removesuffix("Text") + head
    return plain(getattr(transformers, f"{prefix}Config")(**{**SHAPE, **changes})) | {"architectures": [architecture]}


def found(values: dict[str, Any]) -> DecoderConfig | EncoderConfig | None:
    """Reads the configuration; None: rejected."""
    try:
        return check_config(text_part(values))
    except InvalidArgument:
        return None


def different(ours: Any, theirs: Any) -> str:
    pairs = {one.name: (getattr(ours, one.name), getattr(theirs, one.name)) for one in fields(ours)}
    return ", ".join(f"{name}: {mine} != {other}" for name, (mine, other) in pairs.items() if mine != other)


def other_meanings(values: dict[str, Any], section: str = "") -> dict[str, str]:
    """Returns fields whose default differs from transformers'."""
    inner = values[section] if section else values
    wrong = {}
    for name in sorted(inner.keys() - set(NOT_COMPARED)):
        left = {key: value for key, value in inner.items() if key != name}
        less = values | {section: left} if section else left
        try:
            meant = plain(transformers.AutoConfig.for_model(**json.loads(json.dumps(less))))
        except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError, StrictDataclassError):
            continue  # required by transformers
        ours, theirs = found(less), found(meant | {"architectures": values["architectures"]})
        if isinstance(ours, TransformersConfig) or ours is None or theirs is None or ours == theirs:
            continue
        wrong[name] = different(ours, theirs)
    return wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_left_out_means_what_transformers_means(family: str) -> None:
    assert not other_meanings(family_config(family))


@pytest.mark.parametrize("name", MODELS)
def test_absent_fields_in_the_text_part_of_a_vision_model(name: str) -> None:
    assert not other_meanings(plain(MODELS[name]()) | {"architectures": [name]}, "text_config")
