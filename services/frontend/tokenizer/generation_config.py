"""Defaults of the model's author: sampling parameters and end-of-sequence tokens (generation_config.json)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.services.frontend.request.scalar_parameters import RECOMMENDED, SCALAR_PARAMETERS
from quire.services.frontend.tokenizer.config_files import read_optional_json
from quire.shared.errors import InvalidArgument
from quire.shared.models.model_identity import read_config

LEAST_TOP_P = 1e-6  # transformers takes 0 for only the most likely token, and so do we
LENGTH = "max_new_tokens"
INTEGERS = frozenset({LENGTH, *(one.name for one in SCALAR_PARAMETERS if one.is_integer)})


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults that apply between the request's values and the protocol's defaults."""

    sampling: Mapping[str, float | int] = field(default_factory=dict)  # sampling parameters by name
    max_new_tokens: int | None = None


def read_defaults(folder: Path) -> GenerationDefaults:
    """Reads the author's defaults, none without the file; a top_p of 0 becomes the least valid one. Raises
    InvalidArgument for values that are not numbers."""
    config = read_optional_json(folder / "generation_config.json")
    named = {name: _number(name, config.get(name)) for name in ("temperature", *RECOMMENDED)}
    if named["top_p"] == 0:
        named["top_p"] = LEAST_TOP_P
    sampling = {name: value for name, value in named.items() if value is not None}
    return GenerationDefaults(sampling, _number(LENGTH, config.get(LENGTH)))


def read_eos_ids(folder: Path) -> list[int]:
    """Returns the end-of-sequence tokens of generation_config.json, or else those of config.json."""
    config = read_optional_json(folder / "generation_config.json")
    return _as_list(config.get("eos_token_id")) or _as_list(read_config(folder).get("eos_token_id"))


def _number(name: str, value: Any) -> Any:
    """Checks a numeric default and returns it, whole floats as integers where those are needed; raises
    InvalidArgument otherwise."""
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and name not in INTEGERS:
        return value
    if is_number and math.isfinite(value) and value == int(value) and (name != LENGTH or value >= 1):
        return int(value)
    needed = "an integer of at least 1" if name == LENGTH else "an integer" if name in INTEGERS else "a number"
    text = f"model: generation_config.json: {name} must be {needed}, got {value!r}; correct it or leave it out"
    raise InvalidArgument(text, field="model")


def _as_list(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [v for v in value if isinstance(v, int)] if isinstance(value, list) else []
