"""What the model's author recommends: sampling defaults and end-of-sequence tokens (generation_config.json)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.services.frontend.tokenizer.folder import read_optional
from quire.shared.errors import InvalidArgument
from quire.shared.models.model_identity import read_config

INTEGERS = frozenset({"top_k", "max_new_tokens"})
LEAST_TOP_P = 1e-6  # transformers takes 0 for the most likely token alone, and so does this


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults between the request's own values and the protocol's; None where the author says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    @cached_property
    def sampling(self) -> Mapping[str, float | int]:
        """What the author says of sampling, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name != "max_new_tokens")
        return {name: value for name, value in named if value is not None}


def read_defaults(folder: Path) -> GenerationDefaults:
    """Raises InvalidArgument for what is no number."""
    config = read_optional(folder / "generation_config.json")
    found = {field.name: _number(field.name, config.get(field.name)) for field in fields(GenerationDefaults)}
    if found["top_p"] == 0:
        found["top_p"] = LEAST_TOP_P
    return GenerationDefaults(**found)


def read_eos_ids(folder: Path) -> list[int]:
    """End-of-sequence tokens that generation_config.json names, else those of config.json."""
    config = read_optional(folder / "generation_config.json")
    return _as_list(config.get("eos_token_id")) or _as_list(read_config(folder).get("eos_token_id"))


def _number(name: str, value: Any) -> Any:
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and name not in INTEGERS:
        return value
    if is_number and math.isfinite(value) and value == int(value) and (name != "max_new_tokens" or value >= 1):
        return int(value)
    needed = {"top_k": "an integer", "max_new_tokens": "an integer of at least 1"}.get(name, "a number")
    text = f"model: generation_config.json: {name} must be {needed}, got {value!r}; correct it or leave it out"
    raise InvalidArgument(text, field="model")


def _as_list(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    return [v for v in value if isinstance(v, int)] if isinstance(value, list) else []
