"""`quant_method: awq` (AutoAWQ, version gemm): 4 bits with zero points, eight outputs per word in interleaved order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.layers.quantization import name_patterns
from quire.services.worker.layers.quantization.bit_fields import unpacked
from quire.services.worker.layers.quantization.fields import Fields
from quire.services.worker.layers.quantization.port import CheckpointTensor
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.reference.quantized_linear import QuantizedWeight

METHOD = "awq"
BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output held by each field of a word


@dataclass(frozen=True, slots=True)
class Awq:
    """Quantization configuration and the only scheme of its projections."""

    group_size: int  # 0: one group per row
    zero_points: bool
    ignored: tuple[str, ...]
    method: str = METHOD
    supports_single_row: bool = True

    @property
    def packed(self) -> tuple[int, float | None]:
        """Group size and common zero point of the 4-bit weights (CheckpointQuantization); 8 without zero points."""
        return self.group_size, None if self.zero_points else 8.0

    def scheme(self, name: str) -> Awq | None:
        """Returns the only scheme; None for projections that are not quantized."""
        return None if name_patterns.matches(name, self.ignored) else self

    def check(self, name: str, out_features: int, in_features: int) -> None:
        """Raises InvalidArgument unless groups divide the inputs and words of eight the outputs."""
        if in_features % (self.group_size or 1) or out_features % len(ORDER):
            raise InvalidArgument(
                f"model: {name} is {out_features} x {in_features}, but AWQ has {len(ORDER)} outputs in a word and "
                f"groups of {self.group_size or in_features}",
                field="model",
            )

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, CheckpointTensor]:
        """Returns shapes and dtypes of qweight, scales and, with zero points, qzeros, by suffix."""
        import torch

        words, groups = out_features // len(ORDER), in_features // (self.group_size or in_features)
        stored = {
            "qweight": CheckpointTensor((in_features, words), torch.int32),
            "scales": CheckpointTensor((groups, out_features), torch.float32),
        }
        return stored | ({"qzeros": CheckpointTensor((groups, words), torch.int32)} if self.zero_points else {})

    def unpack(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        """Unpacks the words to codes [out_features, in_features] with scales and zero points by group."""
        import torch

        from quire.kernels.reference.quantized_linear import QuantizedWeight

        scales = tensors["scales"].t()
        if self.zero_points:
            zeros = unpacked(tensors["qzeros"], BITS, 1, order=ORDER).t().float()
        else:
            zeros = torch.full_like(scales, 2 ** (BITS - 1))
        codes = unpacked(tensors["qweight"], BITS, 1, order=ORDER).t()
        return QuantizedWeight(codes, scales, zeros, group_size=self.group_size or in_features, bits=BITS)


def read(fields: Fields) -> Awq:
    """Reads the configuration: bits, version, group size, zero points. Raises InvalidArgument for unsupported
    values."""
    fields.one_of("bits" if fields.get("bits") is not None else "w_bit", (BITS,))
    fields.one_of("version", ("gemm", "GEMM"), default="gemm")
    size = fields.integer("group_size", "q_group_size")
    if size < 1 and size != -1:
        raise fields.refusal("group_size", size, "at least 1, or -1 for whole rows")
    ignored = (*fields.names("modules_to_not_convert"), *name_patterns.NEVER_QUANTIZED)
    return Awq(max(size, 0), fields.flag("zero_point", True), ignored)
