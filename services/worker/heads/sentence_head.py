"""Layers after the hidden states as a sentence-transformers folder defines them: pooling, dense layers,
normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from quire.services.worker.models.loading.loader import named_tensors
from quire.shared.errors import InvalidArgument
from quire.shared.models.sentence_transformers import DenseModule, SentenceModel, read_sentence_model

LINEAR = "linear"
NAMES = ("linear.weight", "linear.bias")


class SentenceHead:
    """Default way to compute a prompt's vector: pooling modes, dense layers, and whether the result is normalised
    (which the caller does)."""

    def __init__(
        self, modes: tuple[str, ...], normalizes: bool, denses: tuple[Dense, ...] = (), *, compares: bool = False
    ) -> None:
        """`compares`: the vectors are meant for late interaction."""
        self.modes, self.normalizes, self.compares = modes, normalizes, compares
        self._denses = denses

    @classmethod
    def from_folder(
        cls, folder: Path, plain: SentenceModel, device: torch.device, *, load: bool = True
    ) -> SentenceHead:
        """Reads the folder's modules. `plain`: used for a folder without modules.json; `load`: False initialises
        weights randomly. Raises InvalidArgument for dense layers that cannot be read."""
        model = read_sentence_model(folder) or plain
        denses = tuple(Dense(folder, one, device, load=load) for one in model.denses)
        return cls(model.modes, model.normalizes, denses, compares=model.late is not None)

    def size(self, hidden_size: int) -> int:
        """Returns the number of elements of a vector, given the model's hidden size: that of the last dense layer, or
        of all pooled states together."""
        return self._denses[-1].out_features if self._denses else hidden_size * len(self.modes)

    def __call__(self, pooled: Tensor) -> Tensor:
        """Applies the dense layers: float32 [num_rows, num_modes * hidden_size] -> float32 [num_rows, size]."""
        for dense in self._denses:
            pooled = dense(pooled)
        return pooled


class Dense:
    """Dense layer with an activation, stored in a subfolder and computed in float32. Raises InvalidArgument for files
    that are missing, damaged or of other shapes than config.json says."""

    def __init__(self, folder: Path, module: DenseModule, device: torch.device, *, load: bool) -> None:
        self.out_features = module.out_features
        self._activation = module.activation
        shape = (module.out_features, module.in_features)
        if not load:
            self._weight, self._bias = torch.randn(shape, device=device) * shape[1] ** -0.5, None
            return
        try:
            found = _tensors(folder / module.folder) if module.tensors == LINEAR else _own_tensors(folder, module)
            tensors = dict(found)
        except (OSError, SafetensorError, RuntimeError, UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidArgument(f"model: cannot read {folder / module.folder}: {reason}", field="model") from None
        weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
        if weight is None or tuple(weight.shape) != shape or (bias is None) is module.bias:
            text = (
                f"model: {folder / module.folder} does not contain linear.weight {list(shape)} and the tensors "
                "that config.json implies"
            )
            raise InvalidArgument(text, field="model")
        # Copies: the tensors map the file, whose pages vanish if it is truncated while it is served.
        self._weight = weight.to(device, torch.float32, copy=True)
        self._bias = None if bias is None else bias.to(device, torch.float32, copy=True)

    def __call__(self, x: Tensor) -> Tensor:
        """Applies the layer: float32 [num_rows, in_features] -> float32 [num_rows, out_features]."""
        x = functional.linear(x, self._weight, self._bias)
        if self._activation == "tanh":
            return x.tanh()
        if self._activation == "gelu":
            return functional.gelu(x)
        return x.relu() if self._activation == "relu" else x


def _own_tensors(folder: Path, module: DenseModule) -> Iterator[tuple[str, Tensor]]:
    """Yields weight and bias of a module that is stored among the model's own tensors, as _tensors() names them."""
    wanted = {f"{module.tensors}.{part}": f"{LINEAR}.{part}" for part in ("weight", "bias")}
    for name, source in named_tensors(folder):
        if name in wanted:
            yield wanted[name], source.read()


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of model.safetensors, or else of pytorch_model.bin (weights only). Raises
    InvalidArgument if neither exists."""
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if safe.exists():
        with safe_open(safe, "pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys() if name in NAMES)  # noqa: SIM118
    elif pickled.exists():
        yield from torch.load(pickled, map_location="cpu", weights_only=True).items()
    else:
        raise InvalidArgument(
            f"model: {folder} contains neither model.safetensors nor pytorch_model.bin", field="model"
        )
