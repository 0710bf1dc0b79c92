"""`quant_method: compressed-tensors` (llm-compressor): groups of projections with a scheme each.

float8 or int8 weights with quantized activations (`float-quantized`, `int-quantized`, `naive-quantized`), or 4-bit and
8-bit integers packed into words (`pack-quantized`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from quire.services.worker.layers.quantization import name_patterns
from quire.services.worker.layers.quantization.eight_bits import BLOCK, Activations, EightBits, Strategy
from quire.services.worker.layers.quantization.fields import Fields
from quire.services.worker.layers.quantization.packed_integers import PackedIntegers
from quire.services.worker.layers.quantization.port import Scheme

METHOD = "compressed-tensors"
ALL_LINEAR = "Linear"  # module class: all projections
PACKED = "pack-quantized"
PLAIN = ("float-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """Quantization configuration: the first group that names a projection gives its scheme, else the first for all."""

    groups: tuple[tuple[tuple[str, ...], Scheme], ...]  # (targets, scheme)
    ignored: tuple[str, ...]
    method: str = METHOD

    @property
    def supports_single_row(self) -> bool:
        """Whether all groups have 4-bit weights, or 8 bits with a scale per row and 8-bit activations."""
        return all(
            scheme.by_row if isinstance(scheme, EightBits) else isinstance(scheme, PackedIntegers) and scheme.bits == 4
            for _, scheme in self.groups
        )

    @property
    def packed(self) -> tuple[int, float | None] | None:
        """Group size and common zero point of 4-bit weights if all groups share such a scheme without act-order; else
        None."""
        schemes = {scheme for _, scheme in self.groups}
        only = next(iter(schemes)) if len(schemes) == 1 else None
        if not isinstance(only, PackedIntegers) or only.bits != 4 or only.act_order:
            return None
        return only.group_size, None if only.zero_points else 8.0

    def scheme(self, name: str) -> Scheme | None:
        """Returns the scheme of the first group that names the projection, else that of the first group for all; None
        if it is ignored."""
        if name_patterns.matches(name, self.ignored):
            return None
        named = (scheme for targets, scheme in self.groups if name_patterns.matches(name, targets))
        rest = (scheme for targets, scheme in self.groups if ALL_LINEAR in targets)
        return next(named, next(rest, None))


def read(fields: Fields) -> CompressedTensors:
    """Reads format and groups. Raises InvalidArgument for sparse or uncompressed weights and unsupported schemes."""
    form = fields.one_of("format", (*PLAIN, PACKED), default="naive-quantized")
    fields.one_of("quantization_status", ("compressed",), default="compressed")
    sparsity = fields.section("sparsity_config")
    if sparsity is not None:
        sparsity.one_of("format", ("dense",), default="dense")
    groups = fields.section("config_groups")
    if groups is None:
        raise fields.refusal("config_groups", None, "an object is needed")
    read = [(group.names("targets"), _scheme(group, form)) for _, group in groups.sections()]
    return CompressedTensors(tuple(read), fields.names("ignore"))


def _scheme(group: Fields, form: str) -> Scheme:
    """Reads the scheme of one group; `form`: format of the whole checkpoint. Raises InvalidArgument for unsupported
    combinations."""
    form = group.one_of("format", (*PLAIN, PACKED), default=form)
    weights, inputs = group.section("weights"), group.section("input_activations")
    if weights is None:
        raise group.refusal("weights", None, "an object is needed")
    group.reject_fields("output_activations")
    kind = weights.one_of("type", ("int", "float"), default="int")
    strategies = ("tensor", "channel", "group", "block") if form != PACKED else ("channel", "group")
    strategy = weights.one_of("strategy", strategies)
    if strategy == "block" and weights.get("block_structure") not in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise weights.refusal("block_structure", weights.get("block_structure"), f"supported: [{BLOCK}, {BLOCK}]")
    group_size = weights.integer("group_size") if strategy == "group" else 0
    if strategy == "group" and group_size < 1:
        raise weights.refusal("group_size", group_size, "at least 1")
    zero_points = not weights.flag("symmetric", True)
    if form == PACKED:
        weights.one_of("type", ("int",), default="int")
        if inputs is not None:
            raise group.refusal("input_activations", "quantized", f"{PACKED} weights require unquantized activations")
        act_order = weights.one_of("actorder", ("group", "weight", "static"), default="static") == "group"
        return PackedIntegers(weights.one_of("num_bits", (4, 8)), group_size, zero_points, act_order)
    weights.one_of("num_bits", (8,))
    activations = "none" if inputs is None else _activations(inputs, kind, strategy)
    return EightBits(
        "fp8" if kind == "float" else "int8", cast(Strategy, strategy), activations, group_size, zero_points
    )


def _activations(inputs: Fields, kind: str, weights: str) -> Activations:
    """Returns how activations are quantized: static per tensor, or dynamic per token.

    `kind`: type of the weights, which activations must share; `weights`: their strategy. Raises InvalidArgument for
    others.
    """
    inputs.one_of("num_bits", (8,))
    inputs.one_of("type", (kind,), default="int")
    inputs.one_of("symmetric", (True,), default=True)
    dynamic = inputs.flag("dynamic", False)
    if not dynamic:
        inputs.one_of("strategy", ("tensor",), default="tensor")
        return "static"
    inputs.one_of("strategy", ("group",) if weights == "block" else ("token",))
    if weights == "block":
        inputs.one_of("group_size", (BLOCK,))
    return "token"
