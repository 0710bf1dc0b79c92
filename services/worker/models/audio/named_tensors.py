"""Tensors of a part of an encoder, by their names within it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement


class NamedTensors:
    """Weights of an encoder's module that has no layers of its own kind."""

    def __init__(self, name: str, shapes: Mapping[str, tuple[int, ...]], place: LayerPlacement) -> None:
        """Allocates the tensors, whose names in checkpoints follow `name` and a dot."""
        self._name = name
        self._tensors = {key: place.empty(*shape) for key, shape in shapes.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for key, tensor in self._tensors.items():
            yield f"{self._name}.{key}", tensor

    def finish(self) -> None:
        """Does nothing: the tensors are used as they are."""

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Multiplies by `name`.weight and adds `name`.bias, if there is one."""
        from torch.nn import functional

        return functional.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def normed(self, name: str, x: Tensor, eps: float = 1e-5) -> Tensor:
        """Applies the layer norm `name`."""
        from torch.nn import functional

        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        return functional.layer_norm(x, (x.size(-1),), weight, bias, eps)


def linear_shapes(name: str, outputs: int, inputs: int, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a linear layer's tensors."""
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def norm_shapes(name: str, size: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a norm's tensors."""
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
