"""Environment that every layer is built with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.kernels import Ops
from quire.services.worker.layers.context import ALL_TOKENS, Context
from quire.services.worker.layers.quantization.port import CheckpointQuantization
from quire.services.worker.layers.sharding import WHOLE, Shard, TensorPart
from quire.services.worker.layers.stages import ALL_LAYERS, Stage
from quire.services.worker.lora.adapters import AdapterManager

# Destination of a checkpoint tensor, or of a rank's part of it.
Destination = Tensor | TensorPart


def memory_of(destination: Destination) -> Tensor:
    """Returns this rank's memory of the tensor."""
    return destination.tensor if isinstance(destination, TensorPart) else destination


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Environment of a layer: kernels, dtype, device, quantization, and its place among parallel ranks."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    quantization: str = "none"  # at load, for linear layers except the output head: "none", "fp8", "fp8_block"
    batch_invariant: bool = False  # results of a row have the same bits in any batch
    checkpoint: CheckpointQuantization | None = None  # quantization schemes of the checkpoint
    shard: Shard = WHOLE
    adapters: AdapterManager | None = None
    stage: Stage = ALL_LAYERS
    context: Context = ALL_TOKENS

    def min_over_ranks(self, value: int) -> int:
        """Returns the minimum of all ranks' values, over stages, context and tensor parallelism; all ranks must call
        it."""
        if not self.stage.is_whole:
            return self.stage.link.min_over_ranks(value)
        return self.context.peers.min_over_ranks(self.shard.collectives.min_over_ranks(value))

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Loadable(Protocol):
    """Layer or model as the loader sees it: names and memory of its tensors, then finish()."""

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        """Yields the names of the layer's checkpoint tensors and the memory to copy them into."""

    def finish(self) -> None:
        """Called once after all destinations are filled; the layer may pack its tensors and free the loaded ones."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Checkpoint tensor that may stand in for several others that the model asks for."""

    destination: Destination
    instead_of: tuple[str, ...]
    transposed: Destination | None = None  # the same memory, for files that have the last two dimensions exchanged

    def of_shape(self, shape: Sequence[int]) -> Destination:
        """Returns the destination for a tensor of this shape: `transposed` if only that one fits."""
        if self.transposed is None or list(shape) == list(self.destination.shape):
            return self.destination
        return self.transposed if list(shape) == list(self.transposed.shape) else self.destination


@runtime_checkable
class SelfLoadingModel(Protocol):
    """Model that loads its checkpoint with another library."""

    def load_folder(self, folder: Path) -> None:
        """Loads the folder. Raises InvalidArgument with the tensors that do not match."""


class LoadableModel(Loadable, Protocol):
    """Model that the loader fills from a checkpoint."""

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        """Checkpoint tensors, by name, that may come in place of some of those in destinations()."""

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Checkpoint tensors to ignore; a trailing dot ignores all names with that prefix."""
