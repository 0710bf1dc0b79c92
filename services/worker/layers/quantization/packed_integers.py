"""`pack-quantized` of compressed-tensors: unsigned 4-bit or 8-bit integers packed along rows.

`weight_packed`, `weight_scale` [out_features, groups], `weight_zero_point` packed along the outputs, and with
`actorder: group` also `weight_g_idx`, the group of each column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.layers.quantization.bit_fields import WORD, unpacked
from quire.services.worker.layers.quantization.groups import grouped
from quire.services.worker.layers.quantization.port import CheckpointTensor
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.reference.quantized_linear import QuantizedWeight


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Scheme of packed integer weights; activations are not quantized."""

    bits: int
    group_size: int  # 0: one group per row
    zero_points: bool
    act_order: bool = False

    def check(self, name: str, out_features: int, in_features: int) -> None:
        """Raises InvalidArgument if groups do not divide the rows."""
        if in_features % (self.group_size or 1):
            raise InvalidArgument(
                f"model: {name} has rows of {in_features}, which groups of {self.group_size} do not divide",
                field="model",
            )

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, CheckpointTensor]:
        """Returns shapes and dtypes of packed weight, scales, zero points and column groups, by suffix."""
        import torch

        groups = in_features // (self.group_size or in_features)
        stored = {
            "weight_packed": CheckpointTensor((out_features, -(-in_features * self.bits // WORD)), torch.int32),
            "weight_scale": CheckpointTensor((out_features, groups), torch.float32),
        }
        if self.zero_points:
            words = -(-out_features * self.bits // WORD)
            stored["weight_zero_point"] = CheckpointTensor((words, groups), torch.int32)
        if self.act_order:
            stored["weight_g_idx"] = CheckpointTensor((in_features,), torch.int32)
        return stored

    def unpack(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        """Unpacks the words to codes [out_features, in_features] with scales and zero points by group, columns sorted
        by group."""
        import torch

        codes = unpacked(tensors["weight_packed"], self.bits, 1)[:, :in_features]
        scales = tensors["weight_scale"]
        if self.zero_points:
            zeros = unpacked(tensors["weight_zero_point"], self.bits, 0)[:out_features].float()
        else:
            zeros = torch.full_like(scales, 2 ** (self.bits - 1))
        size = self.group_size or in_features
        return grouped(codes, scales, zeros, tensors.get("weight_g_idx"), group_size=size, bits=self.bits)
