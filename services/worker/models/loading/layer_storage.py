"""Temporary memory for weights in the checkpoint's dtype, per layer while it is loaded.

A layer that is quantized at load gets its memory with its first tensor and is finished after its last one, so a device
need not hold a whole model in the checkpoint's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from quire.services.worker.layers.placement import Loadable, LoadableModel, SelfLoadingModel, memory_of
from quire.services.worker.layers.storage import deallocate, is_empty
from quire.services.worker.models.causal_lm import CausalLM


class LayerStorage:
    """Allocates a layer's weights before its first tensor and releases them after its last."""

    def __init__(self, model: LoadableModel, settle: Callable[[], None]) -> None:
        """Finds the layers whose tensors have no memory yet; allocates such tensors elsewhere at once, until the model
        is finished.

        `settle`: waits until the tensors passed to release() have arrived.
        """
        self._model, self._settle = model, settle
        self._filling: dict[str, _Filling] = {}  # keyed by tensor name
        layers = model.layers if isinstance(model, CausalLM) and not isinstance(model, SelfLoadingModel) else ()
        for index, layer in enumerate(layers):
            tensors = _tensors(layer)
            if any(map(is_empty, tensors.values())):
                filling = _Filling(index, tensors)
                self._filling |= dict.fromkeys(tensors, filling)
        elsewhere = {name: tensor for name, tensor in _tensors(model).items() if name not in self._filling}
        _Filling(0, elsewhere).allocate()  # kept until the whole model is finished

    def allocate(self, names: Collection[str]) -> None:
        """Allocates the layers of these tensors, before they are filled."""
        for name in names:
            if name in self._filling:
                self._filling[name].allocate()

    def mark_filled(self, names: Collection[str]) -> None:
        """Marks these tensors as filled; finishes and deallocates each layer whose last tensor is among them, after
        settle()."""
        for name in names:
            filling = self._filling.pop(name, None)
            if filling is not None and filling.complete(name):
                assert isinstance(self._model, CausalLM)
                self._settle()
                self._model.finish_layer(filling.index)
                filling.deallocate()


class _Filling:
    """Layer that is being loaded: the names of its tensors that are still missing, and those without memory."""

    def __init__(self, index: int, tensors: dict[str, Tensor]) -> None:
        self.index, self.left = index, set(tensors)
        self._empty = sorted((tensor for tensor in tensors.values() if is_empty(tensor)), key=_end, reverse=True)

    def allocate(self) -> None:
        """Allocates the tensors' storages; several may share one, which the last of them ends."""
        for tensor in self._empty:
            if is_empty(tensor):
                tensor.untyped_storage().resize_(_end(tensor))

    def complete(self, name: str) -> bool:
        """Marks the tensor as filled; returns whether it was the layer's last one."""
        self.left.discard(name)
        return not self.left

    def deallocate(self) -> None:
        for tensor in self._empty:
            deallocate(tensor)


def _tensors(part: Loadable) -> dict[str, Tensor]:
    return {name: memory_of(destination) for name, destination in part.destinations()}


def _end(tensor: Tensor) -> int:
    """Returns the number of bytes from the start of the storage to the end of the tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()
