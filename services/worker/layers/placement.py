"""What every layer is built with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

# Where a tensor of the checkpoint goes, or what a rank needs of it.
Destination = Tensor | TensorPart


def memory_of(destination: Destination) -> Tensor:
    """What a rank has of the tensor."""
    return destination.tensor if isinstance(destination, TensorPart) else destination


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Where a layer's tensors live and which functions compute on them."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    quantization: str = "none"  # at load, of linear layers but the output head: also "fp8", "fp8_block"
    batch_invariant: bool = False  # results of a row have the same bits whatever is computed beside it
    checkpoint: CheckpointQuantization | None = None  # which projections a checkpoint has quantized, and how
    shard: Shard = WHOLE
    adapters: AdapterManager | None = None
    stage: Stage = ALL_LAYERS
    context: Context = ALL_TOKENS

    def min_over_ranks(self, value: int) -> int:
        """Of all ranks' values."""
        if not self.stage.is_whole:
            return self.stage.link.min_over_ranks(value)
        return self.context.peers.min_over_ranks(self.shard.collectives.min_over_ranks(value))

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class Loadable(Protocol):
    """A layer as the loader sees it."""

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        """Every tensor of the checkpoint that the layer needs, by name, and the memory to copy it into."""

    def finish(self) -> None:
        """All destinations are filled: the layer may now pack them as it likes."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A tensor that some checkpoints have in place of others that the model asks for."""

    destination: Destination
    instead_of: tuple[str, ...]


@runtime_checkable
class SelfLoadingModel(Protocol):
    """A model whose checkpoints others know how to read."""

    def load_folder(self, folder: Path) -> None:
        """Raises InvalidArgument with the tensors that do not fit."""


class LoadableModel(Loadable, Protocol):
    """What a checkpoint is loaded into."""

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        """By name."""

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Tensors that a checkpoint may hold although the model does not need them; with a dot at its end: all whose
        names begin so."""
