"""Rank and scale of each module in PEFT's adapter_config.json: defaults, and patterns for some modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.shared.errors import InvalidArgument

MAX_ALPHA = 1_000_000
MAX_PATTERNS = 100_000
ANYWHERE = r".*\."  # PEFT's prefix of expert names whose adapters it has joined
PATTERN = re.compile(r"\^?(?:" + re.escape(ANYWHERE) + r")?[\w.]+")


@dataclass(frozen=True, slots=True)
class Scales:
    """Ranks and alphas of an adapter's modules; LoRA's s is alpha / rank, or alpha / sqrt(rank) with rsLoRA."""

    rank: int
    alpha: float
    ranks: Mapping[str, int]  # by module name or suffix of it
    alphas: Mapping[str, float]
    by_root: bool

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Returns rank and s of a module."""
        rank, alpha = _lookup(self.ranks, module, self.rank), _lookup(self.alphas, module, self.alpha)
        return rank, alpha / (rank**0.5 if self.by_root else rank)


def read(name: str, config: Mapping[str, Any], max_rank: int) -> Scales:
    """Parses rank, alpha and their patterns. Raises InvalidArgument that names adapter, field and value, also for a
    rank above `max_rank`."""
    ranks = {key: _rank(name, f"rank_pattern {key}", rank, max_rank) for key, rank in _pattern(name, config, "rank")}
    alphas = {key: _alpha(name, f"alpha_pattern {key}", alpha) for key, alpha in _pattern(name, config, "alpha")}
    rank, alpha = _rank(name, "r", config.get("r"), max_rank), _alpha(name, "lora_alpha", config.get("lora_alpha"))
    return Scales(rank, alpha, ranks, alphas, bool(config.get("use_rslora")))


def _lookup(values: Mapping[str, Any], module: str, other: Any) -> Any:
    """Returns the value of the first key that the module's name ends in, at a dot, as PEFT does."""
    if not values:
        return other
    return next((value for key, value in values.items() if module == key or module.endswith(f".{key}")), other)


def _pattern(name: str, config: Mapping[str, Any], what: str) -> list[tuple[str, Any]]:
    """Returns the entries of rank_pattern or alpha_pattern (`what`: rank or alpha), their keys as plain module names.
    Raises InvalidArgument for regular expressions."""
    field = f"{what}_pattern"
    pattern = config.get(field) or {}
    if not isinstance(pattern, dict) or len(pattern) > MAX_PATTERNS:
        raise refusal(name, f"{field} is {repr(pattern)[:40]}, an object of at most {MAX_PATTERNS:,} names is needed")
    for key in pattern:
        if not PATTERN.fullmatch(key):
            raise refusal(
                name, f"{field} has {key[:80]!r}: only names of modules are supported, not regular expressions"
            )
    return [(key.removeprefix("^").removeprefix(ANYWHERE), value) for key, value in pattern.items()]


def _rank(name: str, field: str, rank: object, most: int) -> int:
    """Returns `rank` if it is a whole number from 1 to `most`. Raises InvalidArgument naming `field` otherwise."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= most:
        raise refusal(name, f"{field} is {rank!r}, a whole number from 1 to {most} is needed")
    return rank


def _alpha(name: str, field: str, alpha: object) -> float:
    """Returns `alpha` if it is a number of at most MAX_ALPHA. Raises InvalidArgument naming `field` otherwise."""
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MAX_ALPHA:
        raise refusal(name, f"{field} is {repr(alpha)[:40]}, a number of at most {MAX_ALPHA:,} is needed")
    return alpha


def refusal(name: str, text: str) -> InvalidArgument:
    return InvalidArgument(f"lora: {name}: {text}", field="lora")
