"""What a checkpoint's quantization says of a projection. Needs no torch: a config.json is judged without."""

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
    """A tensor of the checkpoint: how large, and of what."""

    shape: tuple[int, ...]  # (0,): as large as the checkpoint's
    dtype: torch.dtype


class Scheme(Protocol):
    """How a projection [out_features, in_features] lies in a checkpoint."""

    def check(self, name: str, out_features: int, in_features: int) -> None:
        """Raises InvalidArgument for sizes that it cannot have."""

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, CheckpointTensor]:
        """By what follows the projection's name and a dot."""

    def unpack(self, tensors: Mapping[str, Tensor], out_features: int, in_features: int) -> QuantizedWeight:
        """What the products are computed with."""


class CheckpointQuantization(Protocol):
    """A `quantization_config`, read and found to be one that is computed as it is meant."""

    @property
    def method(self) -> str:
        """As the checkpoint calls it."""

    @property
    def supports_single_row(self) -> bool:
        """A chain for single rows can compute with every projection: 4 bits, or 8 with a scale for each row and
        activations that become 8 bits, too."""

    @property
    def packed(self) -> tuple[int, float | None] | None:
        """Of weights that all have 4 bits and no table: the size of a group (0: a whole row) and the zero that all
        codes have, None if each group has its own. None: there are others."""

    def scheme(self, name: str) -> Scheme | None:
        """Of the projection `name` (without ".weight"); None if it is stored as it is."""
