"""Ports of checkpoint quantization. Needs no torch, so that a config.json can be checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.kernels.reference.quantized_linear import QuantizedWeight


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """Shape and dtype of a checkpoint tensor of a quantized projection."""

    shape: tuple[int, ...]  # (0,): sized as in the checkpoint
    dtype: torch.dtype


class Scheme(Protocol):
    """Storage format of a projection [out_features, in_features]."""

    def check(self, name: str, out_features: int, in_features: int) -> None:
        """Raises InvalidArgument if the scheme does not support these sizes; `name`: of the projection, for the
        error."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, CheckpointTensor]:
        """Returns shape and dtype of each stored tensor, by the suffix of its name after the projection's."""

    def unpack(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        """Converts the loaded tensors, by suffix, to the unpacked weight that the kernels' ops accept."""


class CheckpointQuantization(Protocol):
    """A `quantization_config` that was read and is supported."""

    @property
    def method(self) -> str:
        """Name of the method in config.json."""

    @property
    def supports_single_row(self) -> bool:
        """Whether the chain for single rows supports all projections.

        It supports 4 bits, and 8 bits with a scale per row and 8-bit activations.
        """

    @property
    def packed(self) -> tuple[int, float | None] | None:
        """Group size (0: one per row) and common zero point (None: per group) of 4-bit weights; None for other
        weights."""

    def scheme(self, name: str) -> Scheme | None:
        """Returns the scheme of projection `name` (without ".weight"); None if it is not quantized."""
