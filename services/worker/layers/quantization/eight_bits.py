"""8-bit weights [out_features, in_features] with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quire.services.worker.layers.quantization.port import CheckpointTensor
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.reference.quantized_linear import QuantizedWeight

BLOCK = 128  # side of a weight block, and elements of a token per activation scale

Strategy = Literal["tensor", "channel", "group", "block"]
Activations = Literal["none", "static", "token"]


@dataclass(frozen=True, slots=True)
class EightBits:
    """Scheme of float8_e4m3fn or int8 weights with scales per tensor, row, group or block."""

    kind: Literal["fp8", "int8"]
    weight: Strategy  # granularity of weight scales
    activations: Activations  # not quantized, by a static scale, or by a dynamic scale per token
    group_size: int = 0
    zero_points: bool = False

    @property
    def by_row(self) -> bool:
        """Whether there is one scale per row (or one for all) and activations are in 8 bits."""
        return self.weight in ("tensor", "channel") and self.activations != "none" and not self.zero_points

    def check(self, name: str, out_features: int, in_features: int) -> None:
        """Raises InvalidArgument if groups do not divide the rows; any other size is accepted."""
        if self.weight == "group" and in_features % self.group_size:
            raise InvalidArgument(
                f"model: {name} has rows of {in_features}, which groups of {self.group_size} do not divide",
                field="model",
            )

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, CheckpointTensor]:
        """Returns shapes and dtypes of weight, scales and, if the scheme has them, zero points and the input scale, by
        suffix."""
        import torch

        scales = {
            "tensor": (1,),
            "channel": (out_features, 1),
            "group": (out_features, in_features // (self.group_size or 1)),
            "block": (-(-out_features // BLOCK), -(-in_features // BLOCK)),
        }[self.weight]
        dtype = torch.float8_e4m3fn if self.kind == "fp8" else torch.int8
        stored = {
            "weight": CheckpointTensor((out_features, in_features), dtype),
            "weight_scale": CheckpointTensor(scales, torch.float32),
        }
        if self.zero_points:
            stored["weight_zero_point"] = CheckpointTensor(scales, torch.int8)
        if self.activations == "static":
            stored["input_scale"] = CheckpointTensor((1,), torch.float32)
        return stored

    def unpack(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        """Returns the codes with scales expanded to rows, and how activations are quantized."""
        from quire.kernels.reference.quantized_linear import QuantizedActivations, QuantizedWeight

        codes = tensors["weight"]
        activations = None
        if self.activations != "none":
            group = BLOCK if self.weight == "block" else 0
            activations = QuantizedActivations(codes.dtype, group, tensors.get("input_scale"))
        zeros = tensors.get("weight_zero_point")
        return QuantizedWeight(
            codes,
            self._by_row(tensors["weight_scale"], out_features),
            None if zeros is None else self._by_row(zeros.float(), out_features),
            group_size={"group": self.group_size, "block": BLOCK}.get(self.weight, in_features),
            bits=8,
            activations=activations,
        )

    def _by_row(self, scales: Tensor, out_features: int) -> Tensor:
        """Expands scales to [out_features, groups], so that parts of a fused product keep theirs in any row order."""
        if self.weight == "tensor":
            return scales.view(1, 1).expand(out_features, 1)
        return scales.repeat_interleave(BLOCK, 0)[:out_features] if self.weight == "block" else scales
