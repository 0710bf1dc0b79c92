"""Configuration of mixture-of-experts layers. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.routing import MOST_EXPERTS, SILU, Gate, Routing
from quire.services.worker.layers.config_file import ConfigFile, refusal


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a layer's tensors in the checkpoint, below `model.layers.N`."""

    module: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Sizes and routing of experts, and the layers that have them."""

    num_experts: int
    intermediate_size: int  # of one expert
    routing: Routing
    sparse_layers: tuple[bool, ...]  # by layer: whether it has experts
    shared_intermediate_size: int = 0  # of the shared expert; 0: none
    shared_is_gated: bool = False  # a sigmoid gate per token scales the shared expert
    activation: Gate = SILU
    router_bias: bool = False
    score_correction_bias: bool = False  # e_score_correction_bias: used to choose experts, not to weight them
    in_mxfp4: bool = False  # checkpoint experts are in MXFP4
    biased: bool = False  # expert projections have biases
    by_expert: bool = True  # one checkpoint tensor per expert
    names: ExpertNames = ExpertNames()


def read_num_experts(config: ConfigFile, *fields: str) -> int:
    """Reads the number of experts from the first of `fields` that the file has. Raises InvalidArgument outside 1 to
    MOST_EXPERTS."""
    field = next((field for field in fields if config.has(field)), fields[0])
    count = config.integer(field)
    if not 1 <= count <= MOST_EXPERTS:
        raise refusal(field, count, f"1 to {MOST_EXPERTS} experts are possible")
    return count


def read_top_k(config: ConfigFile, num_experts: int, field: str = "num_experts_per_tok") -> int:
    """Reads the number of routed experts per token. Raises InvalidArgument outside 1 to `num_experts`."""
    top_k = config.integer(field)
    if not 1 <= top_k <= num_experts:
        raise refusal(field, top_k, f"a token can take 1 to {num_experts} experts")
    return top_k


def read_sparse_layers(config: ConfigFile) -> tuple[bool, ...]:
    """Returns by layer whether it has experts, for Qwen: numbers (from 1) divisible by `decoder_sparse_step`, except
    those in `mlp_only_layers` (from 0).

    Raises InvalidArgument for a step below 1 and for a list with other values than integers.
    """
    step, dense = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    if step < 1:
        raise refusal("decoder_sparse_step", step, "must be 1 or more")
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise refusal("mlp_only_layers", dense, "a list of layers is needed")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config.integer("num_hidden_layers")))
