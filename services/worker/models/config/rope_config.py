"""How a checkpoint rotates positions, as transformers 5 spells it (rope_parameters) or earlier ones (rope_scaling)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.services.worker.layers.config_file import ConfigFile, refusal

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
EARLIER_NAMES = {"su": "longrope"}  # of Phi-3's first files
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
    short_factors: tuple[float, ...] = ()  # longrope: what each pair's wave is stretched by, in the old context
    long_factors: tuple[float, ...] = ()  # longrope: and beyond it
    share: float = 1.0  # of a head that is rotated, from its first element on
    interleaved: bool = False  # pairs are neighbours instead of halves


NO_ROPE = RopeConfig(1.0, "none")


def read_rope(config: ConfigFile, *, partial: bool = False) -> RopeConfig:
    """`partial`: the family may rotate a part of each head."""
    section = config.section("rope_parameters") or config.section("rope_scaling") or ConfigFile({})
    return read_section(section, config, partial=partial)


def read_section(section: ConfigFile, config: ConfigFile, *, partial: bool = False) -> RopeConfig:
    """One of several ways, where a family has more than one."""
    theta = section.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    kind = section.get("rope_type") or section.get("type") or "default"
    kind = EARLIER_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise refusal("rope_type", kind, f"there are {', '.join(KINDS)}")
    share = section.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if share != 1 and not partial:
        raise refusal("partial_rotary_factor", share, "this family rotates whole heads")
    return replace(_read_kind(kind, theta, section, config), share=share)


def _read_kind(kind: str, theta: float, section: ConfigFile, config: ConfigFile) -> RopeConfig:
    if kind in ("default", "dynamic"):  # which stretches beyond max_position_embeddings only, where nothing is run
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, section.number("factor"))
    original = section.integer("original_max_position_embeddings", config.integer("max_position_embeddings"))
    if kind == "longrope":
        return _read_longrope(section, theta, config)
    return _read_llama3(section, theta, original) if kind == "llama3" else _read_yarn(section, theta, original, config)


def _read_longrope(section: ConfigFile, theta: float, config: ConfigFile) -> RopeConfig:
    """arXiv 2402.13753, as Phi-3 uses it."""
    longest = config.integer("max_position_embeddings")
    stated = section.get("original_max_position_embeddings")
    original = config.integer("original_max_position_embeddings", stated or longest)
    factor = longest / original
    implied = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        theta,
        "longrope",
        original_max_positions=original,
        attention_factor=section.number("attention_factor", implied),
        short_factors=section.numbers("short_factor"),
        long_factors=section.numbers("long_factor"),
    )


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
