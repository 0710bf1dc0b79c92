"""Classifiers of encoders: a dense layer over a pooled vector, then a linear classifier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.models.encoders.encoder_config import EncoderConfig


class FloatLinear:
    """Linear layer for few rows, in float32."""

    def __init__(self, name: str, out_features: int, in_features: int, bias: bool, place: LayerPlacement) -> None:
        self._name = name
        self._weight: Tensor = place.empty(out_features, in_features)
        self._bias: Tensor | None = place.empty(out_features) if bias else None

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", self._weight
        if self._bias is not None:
            yield f"{self._name}.bias", self._bias

    def finish(self) -> None:
        self._weight = self._weight.float()
        self._bias = None if self._bias is None else self._bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies float32 [num_rows, in_features] -> float32 [num_rows, out_features]."""
        from torch.nn import functional

        return functional.linear(x, self._weight, self._bias)


class PooledClassifier:
    """Classifier of pooled vectors: dense layer, activation, optional norm, class weights, all in float32."""

    def __init__(
        self, dense: str, classes: str, config: EncoderConfig, place: LayerPlacement, *, norm: str = ""
    ) -> None:
        """Builds the layers from checkpoint names; an empty `norm` means none."""
        size = config.hidden_size
        self.num_classes, self.pooler = config.num_classes, config.classifier_pooler
        self._dense = FloatLinear(dense, size, size, config.classifier_bias, place)
        self._classes = FloatLinear(classes, config.num_classes, size, True, place)
        self._activation = config.classifier_activation
        self._norm = norm
        self._norm_weight: Tensor | None = place.empty(size) if norm else None
        self._norm_bias: Tensor | None = place.empty(size) if norm and config.norm_bias else None
        self._norm_eps = config.norm_eps

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._dense.destinations()
        yield from self._classes.destinations()
        if self._norm_weight is not None:
            yield f"{self._norm}.weight", self._norm_weight
        if self._norm_bias is not None:
            yield f"{self._norm}.bias", self._norm_bias

    def finish(self) -> None:
        self._dense.finish()
        self._classes.finish()
        self._norm_weight = None if self._norm_weight is None else self._norm_weight.float()
        self._norm_bias = None if self._norm_bias is None else self._norm_bias.float()

    def __call__(self, vectors: Tensor) -> Tensor:
        """Computes the scores: float32 [num_rows, hidden_size] -> float32 [num_rows, num_classes]."""
        from torch.nn import functional

        x = self._dense(vectors)
        x = x.tanh() if self._activation == "tanh" else functional.gelu(x)
        if self._norm_weight is not None:
            x = functional.layer_norm(x, (x.size(1),), self._norm_weight, self._norm_bias, self._norm_eps)
        return self._classes(x)
