"""Memory for a layer's weights as the checkpoint has them, only while they are loaded.

A layer that is made smaller once it is loaded (quantized) has its room when its first tensor comes and is finished
behind its last one: a device need not hold a whole model as it was before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor

from quire.services.worker.layers.placement import Loadable, LoadableModel, LoadsItself, memory_of
from quire.services.worker.layers.rooms import is_empty, take_away
from quire.services.worker.models.causal_lm import CausalLM


class Rooms:
    def __init__(self, model: LoadableModel, settle: Callable[[], None]) -> None:
        """`settle`: waits until what has been closed is there."""
        self._model, self._settle = model, settle
        self._filling: dict[str, _Filling] = {}  # by a tensor's name
        layers = model.layers if isinstance(model, CausalLM) and not isinstance(model, LoadsItself) else ()
        for index, layer in enumerate(layers):
            tensors = _tensors(layer)
            if any(map(is_empty, tensors.values())):
                filling = _Filling(index, tensors)
                self._filling |= dict.fromkeys(tensors, filling)
        elsewhere = {name: tensor for name, tensor in _tensors(model).items() if name not in self._filling}
        _Filling(0, elsewhere).open()  # until the whole model is finished

    def open(self, names: Collection[str]) -> None:
        """Before these are filled."""
        for name in names:
            if name in self._filling:
                self._filling[name].open()

    def close(self, names: Collection[str]) -> None:
        """They are filled."""
        for name in names:
            filling = self._filling.pop(name, None)
            if filling is not None and filling.closes(name):
                assert isinstance(self._model, CausalLM)
                self._settle()
                self._model.finish_layer(filling.index)
                filling.end()


class _Filling:
    def __init__(self, index: int, tensors: dict[str, Tensor]) -> None:
        self.index, self.left = index, set(tensors)
        self._empty = sorted((tensor for tensor in tensors.values() if is_empty(tensor)), key=_end, reverse=True)

    def open(self) -> None:
        """Several tensors may lie in one room, one of which ends where it does."""
        for tensor in self._empty:
            if is_empty(tensor):
                tensor.untyped_storage().resize_(_end(tensor))

    def closes(self, name: str) -> bool:
        """Whether it was the last one."""
        self.left.discard(name)
        return not self.left

    def end(self) -> None:
        for tensor in self._empty:
            take_away(tensor)


def _tensors(part: Loadable) -> dict[str, Tensor]:
    return {name: memory_of(destination) for name, destination in part.destinations()}


def _end(tensor: Tensor) -> int:
    """Behind its last byte, from where its room begins."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()
