"""`quant_method: fp8`, as published for DeepSeek-V3 and Qwen3-FP8 (FineGrainedFP8Config of transformers).

`weight` in float8_e4m3fn, `weight_scale_inv` (older: `weight_scale`): one factor, or one per block. Activations are
quantized dynamically, or (`activation_scheme: static`) with a scale of the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.layers.quantization import name_patterns
from quire.services.worker.layers.quantization.eight_bits import EightBits
from quire.services.worker.layers.quantization.fields import Fields

if TYPE_CHECKING:
    from quire.services.worker.layers.quantization.port import Scheme

METHOD = "fp8"
BLOCK = 128


@dataclass(frozen=True, slots=True)
class Fp8:
    """Quantization configuration with one scheme, except for listed projections."""

    all: EightBits
    ignored: tuple[str, ...]
    method: str = METHOD

    @property
    def supports_single_row(self) -> bool:
        return self.all.by_row

    @property
    def packed(self) -> None:
        return None

    def scheme(self, name: str) -> Scheme | None:
        return None if name_patterns.matches(name, self.ignored) else self.all


def read(fields: Fields) -> Fp8:
    """Reads the configuration: scales per tensor or per block of 128 x 128, static or dynamic activations.

    Raises InvalidArgument for other blocks and for blocks with static activations.
    """
    fields.one_of("fmt", ("e4m3",), default="e4m3")
    static = fields.one_of("activation_scheme", ("dynamic", "static"), default="dynamic") == "static"
    blocks = fields.get("weight_block_size")
    if blocks is not None and blocks != [BLOCK, BLOCK]:
        raise fields.refusal("weight_block_size", blocks, f"supported: [{BLOCK}, {BLOCK}]")
    if blocks and static:
        raise fields.refusal("activation_scheme", "static", "blocks of weights require dynamic activation scales")
    ignored = (*fields.names("modules_to_not_convert"), *fields.names("ignored_layers"), *name_patterns.NEVER_QUANTIZED)
    return Fp8(
        EightBits("fp8", weight="block" if blocks else "tensor", activations="static" if static else "token"), ignored
    )
