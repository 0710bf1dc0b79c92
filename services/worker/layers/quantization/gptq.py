"""`quant_method: gptq` (AutoGPTQ, GPTQModel): 4 or 8 bits packed along the inputs, groups in any order (act-order).

Version 1 of the format stores zero points minus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.layers.quantization import name_patterns
from quire.services.worker.layers.quantization.bit_fields import WORD, unpacked
from quire.services.worker.layers.quantization.fields import Fields
from quire.services.worker.layers.quantization.groups import grouped
from quire.services.worker.layers.quantization.port import CheckpointTensor
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.reference.quantized_linear import QuantizedWeight

METHOD = "gptq"
FIRST_VERSION = "gptq"


@dataclass(frozen=True, slots=True)
class Gptq:
    """Quantization configuration and the only scheme of its projections."""

    bits: int
    group_size: int  # 0: one group per row
    act_order: bool
    zeros_less_one: bool
    symmetric: bool
    ignored: tuple[str, ...]
    method: str = METHOD

    @property
    def supports_single_row(self) -> bool:
        return self.bits == 4

    @property
    def packed(self) -> tuple[int, float | None] | None:
        """Group size and common zero point of 4-bit weights without act-order, else None; symmetric checkpoints store
        zero points as well."""
        return (self.group_size, 8.0 if self.symmetric else None) if self.bits == 4 and not self.act_order else None

    def scheme(self, name: str) -> Gptq | None:
        return None if name_patterns.matches(name, self.ignored) else self

    def check(self, name: str, out_features: int, in_features: int) -> None:
        """Raises InvalidArgument unless groups divide the inputs and words both inputs and outputs."""
        count = WORD // self.bits
        if in_features % (self.group_size or 1) or in_features % count or out_features % count:
            raise InvalidArgument(
                f"model: {name} is {out_features} x {in_features}, but GPTQ has {count} codes in a word and groups of "
                f"{self.group_size or in_features}",
                field="model",
            )

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, CheckpointTensor]:
        """Returns shapes and dtypes of qweight, qzeros, scales and, with act-order, g_idx, by suffix."""
        import torch

        count, groups = WORD // self.bits, in_features // (self.group_size or in_features)
        stored = {
            "qweight": CheckpointTensor((in_features // count, out_features), torch.int32),
            "qzeros": CheckpointTensor((groups, out_features // count), torch.int32),
            "scales": CheckpointTensor((groups, out_features), torch.float32),
        }
        return stored | ({"g_idx": CheckpointTensor((in_features,), torch.int32)} if self.act_order else {})

    def unpack(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        """Unpacks the words to codes [out_features, in_features] with scales and zero points by group, columns sorted
        by group."""
        codes = unpacked(tensors["qweight"], self.bits, 0).t()
        zeros = unpacked(tensors["qzeros"], self.bits, 1).t()
        if self.zeros_less_one:
            zeros = (zeros + 1) & (2**self.bits - 1)
        size = self.group_size or in_features
        return grouped(
            codes, tensors["scales"].t(), zeros.float(), tensors.get("g_idx"), group_size=size, bits=self.bits
        )


def read(fields: Fields) -> Gptq:
    """Reads the configuration: bits, group size, act-order, version. Raises InvalidArgument for overrides by module and
    other values."""
    fields.reject_fields("dynamic", "modules_in_block_to_quantize", "lm_head")
    bits = fields.one_of("bits", (4, 8))
    size = fields.integer("group_size")
    if size < 1 and size != -1:
        raise fields.refusal("group_size", size, "at least 1, or -1 for whole rows")
    version = fields.one_of("checkpoint_format", (FIRST_VERSION, "gptq_v2"), default=FIRST_VERSION)
    ignored = (*fields.names("modules_to_not_convert"), *name_patterns.NEVER_QUANTIZED)
    return Gptq(
        bits, max(size, 0), fields.flag("desc_act", False), version == FIRST_VERSION, fields.flag("sym", True), ignored
    )
