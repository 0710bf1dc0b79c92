"""DoRA (Liu et al. 2024): scales a layer's outputs to trained magnitudes, given the norm of each row of W + s B A.

The norms are computed from the layer's products: those with unit vectors are the columns of W, those with the rows of A
are A W^T. So they are correct for weights of any format, quantized ones included, as these are computed with. A weight
is traversed once, when the first such adapter is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]  # a layer's outputs without adapters

UNIT_VECTORS_AT_ONCE = 256  # unit vectors
MIN_SQUARED_NORM = 1e-12  # of a squared norm


class WeightNorms:
    """Row norms of one loaded layer, computed on first use and kept."""

    def __init__(self, product: Product, in_features: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._product, self._in_features, self._dtype, self._device = product, in_features, dtype, device
        self._known: tuple[Tensor, Tensor] | None = None

    def gains(
        self, pairs: Sequence[tuple[Tensor, Tensor] | None], magnitudes: Sequence[Tensor | None], sizes: Sequence[int]
    ) -> Tensor:
        """Returns factor and offset of the layer's outputs, float32 [2, out_features]; the offset keeps the bias
        unscaled. `pairs`, `magnitudes` [size], `sizes`: of each projection; without a magnitude the factor is 1."""
        bias, squares = self._bias_and_squared_norms()
        gain = torch.ones_like(bias)
        parts = zip(
            pairs, magnitudes, gain.split(list(sizes)), bias.split(list(sizes)), squares.split(list(sizes)), strict=True
        )
        first = 0
        for pair, magnitude, part_gain, part_bias, part_squares in parts:
            size = part_gain.size(0)
            if pair is not None and magnitude is not None:
                down, up = pair[0], pair[1].float()
                across = self._product(down)[:, first : first + size].float() - part_bias  # A W^T
                inner = down.float() @ down.float().t()
                added = 2 * (up * across.t()).sum(1) + ((up @ inner) * up).sum(1)
                part_gain.copy_(
                    magnitude.to(self._device).float() / (part_squares + added).clamp(min=MIN_SQUARED_NORM).sqrt()
                )
            first += size
        return torch.stack([gain, (1 - gain) * bias])

    def _bias_and_squared_norms(self) -> tuple[Tensor, Tensor]:
        """Returns the bias and each row's squared norm, float32 [out_features] both, computed from the layer's products
        with unit vectors on the first call."""
        if self._known is None:
            nothing = torch.zeros(1, self._in_features, dtype=self._dtype, device=self._device)
            bias = self._product(nothing)[0].float()
            squares = torch.zeros_like(bias)
            for first in range(0, self._in_features, UNIT_VECTORS_AT_ONCE):
                count = min(UNIT_VECTORS_AT_ONCE, self._in_features - first)
                units = torch.zeros(count, self._in_features, dtype=self._dtype, device=self._device)
                units.view(-1)[first :: self._in_features + 1][:count] = 1
                squares += (self._product(units).float() - bias).square_().sum(0)
            self._known = bias, squares
        return self._known
