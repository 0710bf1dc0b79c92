"""Constants that parts of layers are multiplied by, in models that were trained with them outside their weights
(arXiv 2203.03466)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.recurrent.state_space import SpaceScales

OF_FEED_FORWARD, OF_SPACE = 2, 5


@dataclass(frozen=True, slots=True)
class Multipliers:
    """They become part of the weights."""

    attention_input: float
    keys: float
    attention_output: float
    space: SpaceScales
    gates: float
    feed_forward: float


def read_multipliers(config: ConfigFile) -> Multipliers:
    gates, feed_forward = _read_list(config, "mlp_multipliers", OF_FEED_FORWARD)
    return Multipliers(
        attention_input=read_multiplier(config, "attention_in_multiplier"),
        keys=read_multiplier(config, "key_multiplier"),
        attention_output=read_multiplier(config, "attention_out_multiplier"),
        space=SpaceScales(
            input=read_multiplier(config, "ssm_in_multiplier"),
            parts=_read_list(config, "ssm_multipliers", OF_SPACE),
            output=read_multiplier(config, "ssm_out_multiplier"),
        ),
        gates=gates,
        feed_forward=feed_forward,
    )


def read_multiplier(config: ConfigFile, name: str) -> float:
    factor = config.number(name, 1.0)
    if not _is_usable(factor):
        raise refusal(name, factor, "a finite number other than 0 is needed")
    return factor


def _read_list(config: ConfigFile, name: str, length: int) -> tuple[float, ...]:
    factors = config.numbers(name) if config.has(name) else (1.0,) * length
    if len(factors) != length or not all(map(_is_usable, factors)):
        raise refusal(name, list(factors), f"{length} finite numbers other than 0 are needed")
    return factors


def _is_usable(factor: float) -> bool:
    return math.isfinite(factor) and factor != 0
