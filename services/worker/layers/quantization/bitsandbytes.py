"""`quant_method: bitsandbytes`: 4-bit indices into a table (nf4, fp4), or int8 with a scale per row.

nf4: arXiv 2305.14314. Elements are stored row by row, two per byte, the first in the high nibble; blocks of 64 share a
scale. Scales may be quantized to bytes (double quantization): `nested_quant_map` and `nested_absmax` dequantize them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.layers.quantization import name_patterns
from quire.services.worker.layers.quantization.fields import Fields
from quire.services.worker.layers.quantization.port import CheckpointTensor, Scheme
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.reference.quantized_linear import QuantizedWeight

METHOD = "bitsandbytes"
BLOCK = 64  # elements per scale
NESTED_BLOCK = 256  # quantized scales per scale
LARGEST_INT8 = 127


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """Quantization configuration with one scheme for all projections except those in `ignored`."""

    all: Scheme
    ignored: tuple[str, ...]
    method: str = METHOD
    supports_single_row: bool = False
    packed: None = None

    def scheme(self, name: str) -> Scheme | None:
        return None if name_patterns.matches(name, self.ignored) else self.all


@dataclass(frozen=True, slots=True)
class FourBitTable:
    """Scheme of 4-bit indices into a table."""

    table: str  # name in the checkpoint: nf4, fp4
    nested: bool  # scales are quantized to bytes

    def check(self, name: str, out_features: int, in_features: int) -> None:
        """Raises InvalidArgument unless blocks of 64 divide the rows."""
        if in_features % BLOCK:
            raise InvalidArgument(
                f"model: {name} has rows of {in_features}, which blocks of {BLOCK} do not divide", field="model"
            )

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, CheckpointTensor]:
        """Returns shapes and dtypes of weight, scales, table and quantization state, by suffix."""
        import torch

        count = out_features * in_features
        blocks = count // BLOCK
        stored = {
            "weight": CheckpointTensor((count // 2, 1), torch.uint8),
            "weight.absmax": CheckpointTensor((blocks,), torch.uint8 if self.nested else torch.float32),
            "weight.quant_map": CheckpointTensor((16,), torch.float32),
            f"weight.quant_state.bitsandbytes__{self.table}": CheckpointTensor((0,), torch.uint8),
        }
        if self.nested:
            stored["weight.nested_absmax"] = CheckpointTensor((-(-blocks // NESTED_BLOCK),), torch.float32)
            stored["weight.nested_quant_map"] = CheckpointTensor((256,), torch.float32)
        return stored

    def unpack(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        """Splits bytes into indices [out_features, in_features] with scales by block and the table of the
        checkpoint."""
        import torch

        from quire.kernels.reference.quantized_linear import QuantizedWeight

        both = tensors["weight"].view(out_features, -1)
        codes = torch.stack((both >> 4, both & 15), dim=-1).flatten(1)
        return QuantizedWeight(
            codes,
            self._scales(tensors).view(out_features, -1),
            None,
            group_size=BLOCK,
            bits=4,
            table=tensors["weight.quant_map"],
        )

    def _scales(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the scales, float32 [blocks], dequantized if they are nested."""
        if not self.nested:
            return tensors["weight.absmax"]
        state = json.loads(bytes(tensors[f"weight.quant_state.bitsandbytes__{self.table}"].tolist()))
        wide = tensors["weight.nested_quant_map"][tensors["weight.absmax"].long()]
        outer = tensors["weight.nested_absmax"].repeat_interleave(NESTED_BLOCK)[: len(wide)]
        return wide * outer + float(state["nested_offset"])


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Scheme of int8 elements; a row's scale is its largest magnitude."""

    def check(self, name: str, out_features: int, in_features: int) -> None:
        """Does nothing: any size is supported."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, CheckpointTensor]:
        """Returns shapes and dtypes of the int8 weight and of SCB, the largest magnitude of each row."""
        import torch

        return {
            "weight": CheckpointTensor((out_features, in_features), torch.int8),
            "SCB": CheckpointTensor((out_features,), torch.float32),
        }

    def unpack(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        """Returns the int8 codes with a scale per row, the largest magnitude over 127; activations stay in floats."""
        from quire.kernels.reference.quantized_linear import QuantizedWeight

        scales = (tensors["SCB"] / LARGEST_INT8).unsqueeze(1)
        return QuantizedWeight(tensors["weight"], scales, None, group_size=in_features, bits=8)


def read(fields: Fields) -> BitsAndBytes:
    """Reads the configuration: int8 rows, or a 4-bit table. Raises InvalidArgument unless one of both is set, and for
    other storage types."""
    ignored = (*fields.names("llm_int8_skip_modules"), *name_patterns.NEVER_QUANTIZED)
    if fields.flag("load_in_8bit", False):
        return BitsAndBytes(Int8Rows(), ignored)
    if not fields.flag("load_in_4bit", False):
        raise fields.refusal("load_in_4bit", False, "or load_in_8bit must be true")
    fields.one_of("bnb_4bit_quant_storage", ("uint8",), default="uint8")
    table = fields.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), default="fp4")
    return BitsAndBytes(FourBitTable(table, fields.flag("bnb_4bit_use_double_quant", False)), ignored)
