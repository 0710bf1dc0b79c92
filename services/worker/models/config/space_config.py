"""Configuration of Mamba 2 layers, under the names that several families use."""

from __future__ import annotations

from typing import Any

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.recurrent.state_space import SpaceConfig

NO_LIMIT = [0.0, float("inf")]


def read_space(
    config: ConfigFile, values: int, layers: tuple[bool, ...], *, named: str = "mamba_expand * hidden_size"
) -> SpaceConfig:
    """Reads the configuration of Mamba 2 layers. Raises InvalidArgument for sizes that do not divide and for limits of
    time steps.

    `values`: elements of all heads together, named `named` in errors; `layers`: by layer, whether it is recurrent.
    """
    heads, groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", 1)
    if heads < 1 or values < 1 or values % heads:
        raise refusal("mamba_n_heads", heads, f"must divide {named}, {values}")
    if groups < 1 or heads % groups:
        raise refusal("mamba_n_groups", groups, f"must divide mamba_n_heads, {heads}")
    width, limit = config.integer("mamba_d_conv", 4), config.get("time_step_limit")
    if width < 2:
        raise refusal("mamba_d_conv", width, "it must be 2 or more")
    if limit is not None and (len(limit) != len(NO_LIMIT) or [_number(end) for end in limit] != NO_LIMIT):
        raise refusal("time_step_limit", limit, "limits of time steps are not supported")
    bias = config.flag("mamba_proj_bias")
    return SpaceConfig(
        num_heads=heads,
        num_key_heads=groups,
        key_dim=config.integer("mamba_d_state", 256),
        value_dim=values // heads,
        conv_width=width,
        conv_bias=config.flag("mamba_conv_bias", True),
        input_bias=bias,
        output_bias=bias,
        layers=layers,
    )


def _number(value: Any) -> float:
    """Parses a number; transformers writes infinity as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)
