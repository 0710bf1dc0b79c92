"""How a checkpoint rotates positions, as transformers 5 spells it (rope_parameters) or earlier ones (rope_scaling)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.worker.models.config_file import ConfigFile, refusal

KINDS = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Fields beyond theta mean something only to the kinds named beside them."""

    theta: float
    kind: str = "default"
    factor: float = 1.0  # linear, llama3, yarn: how much longer the context became
    original_max_positions: int = 0  # llama3, yarn: before that
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn: multiplies queries' and keys' rotation
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the range of blended dimensions has whole ends


def read_rope(config: ConfigFile) -> RopeConfig:
    section = config.section("rope_parameters") or config.section("rope_scaling") or ConfigFile({})
    theta = section.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind not in KINDS:
        raise refusal("rope_type", kind, f"there are {', '.join(KINDS)}")
    partial = section.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1:
        raise refusal("partial_rotary_factor", partial, "only whole heads can be rotated")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, section.number("factor"))
    original = section.integer("original_max_position_embeddings", config.integer("max_position_embeddings"))
    return _read_llama3(section, theta, original) if kind == "llama3" else _read_yarn(section, theta, original, config)


def _read_llama3(section: ConfigFile, theta: float, original: int) -> RopeConfig:
    return RopeConfig(
        theta,
        "llama3",
        factor=section.number("factor"),
        original_max_positions=original,
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
    )


def _read_yarn(section: ConfigFile, theta: float, original: int, config: ConfigFile) -> RopeConfig:
    factor = section.number("factor", config.integer("max_position_embeddings") / original)
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_positions=original,
        attention_factor=_yarn_attention_factor(section, factor),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
    )


def _yarn_attention_factor(section: ConfigFile, factor: float) -> float:
    """Equation 22 of arXiv 2309.00071, or its DeepSeek form with two scales."""
    if section.has("attention_factor"):
        return section.number("attention_factor")

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    above, below = section.get("mscale"), section.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def max_positions(config: ConfigFile, rope: RopeConfig) -> int:
    """Longest sequence that the checkpoint's positions allow."""
    stated = config.integer("max_position_embeddings")
    if rope.kind == "linear":
        return int(stated * rope.factor)
    if rope.kind == "yarn":
        return max(stated, int(rope.original_max_positions * rope.factor))
    return stated
