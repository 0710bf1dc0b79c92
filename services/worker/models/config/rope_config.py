"""Rotary configuration of a checkpoint, in the notation of transformers 5 (rope_parameters) or earlier
(rope_scaling)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.services.worker.layers.config_file import ConfigFile, refusal

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
EARLIER_NAMES = {"su": "longrope"}  # name in the first Phi-3 files
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary configuration; fields after theta apply only to the kinds named in their comments."""

    theta: float
    kind: str = "default"
    factor: float = 1.0  # linear, llama3, yarn: context extension factor
    original_max_positions: int = 0  # llama3, yarn: context length before extension
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn: factor of the rotation of queries and keys
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: bounds of the blended dimensions are rounded
    short_factors: tuple[float, ...] = ()  # longrope: stretch factor per pair within the original context
    long_factors: tuple[float, ...] = ()  # longrope: stretch factor per pair beyond it
    share: float = 1.0  # rotated fraction of a head, from its first element
    interleaved: bool = False  # pairs are neighbouring elements, not halves
    sections: tuple[int, ...] = ()  # pairs that turn by time, row and column of a picture; empty: by one position
    sections_alternate: bool = False  # pairs of the sections alternate, else they follow each other


NO_ROPE = RopeConfig(1.0, "none")


def read_rope(config: ConfigFile, *, partial: bool = False) -> RopeConfig:
    """Reads the rotary configuration from rope_parameters, rope_scaling or the fields at the top of the file.

    `partial`: the family may rotate a part of each head. Raises InvalidArgument for unknown kinds and for a part in
    other families.
    """
    section = config.section("rope_parameters") or config.section("rope_scaling") or ConfigFile({})
    return read_section(section, config, partial=partial)


def read_section(section: ConfigFile, config: ConfigFile, *, partial: bool = False) -> RopeConfig:
    """Reads one rotary section, for families with several; fields that it lacks are read from `config`.

    Raises InvalidArgument as read_rope().
    """
    theta = section.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    kind = section.get("rope_type") or section.get("type") or "default"
    kind = EARLIER_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise refusal("rope_type", kind, f"supported: {', '.join(KINDS)}")
    share = section.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if share != 1 and not partial:
        raise refusal("partial_rotary_factor", share, "this family supports rotation of whole heads only")
    rope = replace(_read_kind(kind, theta, section, config), share=share)
    if not section.has("mrope_section"):
        return rope
    return replace(rope, sections=_sections(section), sections_alternate=section.flag("mrope_interleaved"))


def _sections(section: ConfigFile) -> tuple[int, ...]:
    """Reads how many pairs turn by time, row and column. Raises InvalidArgument for anything but three numbers."""
    value = section.get("mrope_section")
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(one, int) and one >= 0 for one in value):
        raise refusal("mrope_section", value, "three numbers of pairs are needed")
    return tuple(value)


def _read_kind(kind: str, theta: float, section: ConfigFile, config: ConfigFile) -> RopeConfig:
    """Reads the fields of one kind of rotation; "dynamic" becomes "default", because positions never exceed the trained
    ones."""
    if kind in ("default", "dynamic"):  # dynamic only differs beyond max_position_embeddings, which is never exceeded
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, section.number("factor"))
    original = section.integer("original_max_position_embeddings", config.integer("max_position_embeddings"))
    if kind == "longrope":
        return _read_longrope(section, theta, config)
    return _read_llama3(section, theta, original) if kind == "llama3" else _read_yarn(section, theta, original, config)


def _read_longrope(section: ConfigFile, theta: float, config: ConfigFile) -> RopeConfig:
    """Reads LongRoPE (arXiv 2402.13753), as Phi-3 uses it; without a stated attention factor it follows from the
    extension of the context."""
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
    """Reads Llama 3.1's scaling; all factors must be in the section. `original`: context length before extension."""
    return RopeConfig(
        theta,
        "llama3",
        factor=section.number("factor"),
        original_max_positions=original,
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
    )


def _read_yarn(section: ConfigFile, theta: float, original: int, config: ConfigFile) -> RopeConfig:
    """Reads YaRN (arXiv 2309.00071); without a stated factor it is the ratio of extended to original context."""
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
    """Returns the factor of rotated queries and keys: the stated one, else equation 22 of arXiv 2309.00071, or
    DeepSeek's ratio of two scales."""
    if section.has("attention_factor"):
        return section.number("attention_factor")

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    above, below = section.get("mscale"), section.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def max_positions(config: ConfigFile, rope: RopeConfig) -> int:
    """Returns the longest sequence in tokens that the checkpoint's positions allow, including extension by linear
    scaling or YaRN."""
    stated = config.integer("max_position_embeddings")
    if rope.kind == "linear":
        return int(stated * rope.factor)
    if rope.kind == "yarn":
        return max(stated, int(rope.original_max_positions * rope.factor))
    return stated
