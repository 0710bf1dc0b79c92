"""Dense feed-forward layers, with and without gates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.services.worker.layers.feed_forward.activation import SILU, activate, gated
from quire.services.worker.layers.linear import Linear, Projection, by_rows
from quire.services.worker.layers.sharding import shifted

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.norm.rms_norm import RMSNorm
    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.models.single_row import RowKernels


class PlainMLP:
    """Feed-forward layer without gates: down(activation(up(x))), its features sharded over ranks."""

    def __init__(
        self, up: Projection, down: Projection, hidden_size: int, bias: bool, place: LayerPlacement, *, activation: str
    ) -> None:
        features = place.shard.part(up.out_features, "intermediate_size")
        self._up = Linear([replace(up, taken=(features,))], hidden_size, bias, place)
        self._down = Linear([down], up.out_features, bias, place, columns=features)
        self._activate = activate(activation, place)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._up.destinations()
        yield from self._down.destinations()

    def scale(self, factor: Tensor) -> None:
        """Multiplies the outputs by `factor` [hidden_size]. Call before finish()."""
        self._down.scale(factor)

    def finish(self) -> None:
        self._up.finish()
        self._down.finish()

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape, all-reduced."""
        return self._down(self._activate(self._up(x)))


class MLP:
    """Gated feed-forward layer: down(activation(gate(x)) * up(x)), its features sharded over ranks."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        place: LayerPlacement,
        *,
        activation: str = "silu",
        fused: bool = False,
        names: tuple[str, str] = ("gate_up_proj", "down_proj"),
        scale: float = 1.0,
        gate_scale: float = 1.0,
        reduce_results: bool = True,
    ) -> None:
        """Builds this rank's features without weights.

        `fused`: gate and up are one checkpoint tensor, the first of `names`; the second is that of down. `scale`:
        factor of the output; `gate_scale`: factor of the activation's input; both are folded into the weights.
        `reduce_results`: all-reduces the output, else it stays a partial sum.
        """
        features = place.shard.part(intermediate_size, "intermediate_size")
        gate_up = [Projection(f"{name}.{part}_proj", intermediate_size, taken=(features,)) for part in ("gate", "up")]
        if fused:
            both = (features, shifted(features, intermediate_size))
            gate_up = [Projection(f"{name}.{names[0]}", 2 * intermediate_size, taken=both)]
        self._scale, self._gate_scale, self._num_gates = scale, gate_scale, len(features)
        self._gate = place.ops.silu_mul if activation in SILU else gated(activation, place)
        self.gate_up = Linear(gate_up, hidden_size, bias, place)
        down = Projection(f"{name}.{names[1]}", hidden_size)
        self.down = Linear([down], intermediate_size, bias, place, columns=features, reduce_results=reduce_results)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self.gate_up.destinations()
        yield from self.down.destinations()

    def finish(self) -> None:
        """Folds the scales into the loaded weights and packs them."""
        if self._scale != 1:
            self.down.scale(self._scale)
        if self._gate_scale != 1:
            self.gate_up.scale(by_rows((self._gate_scale, 1.0), (self._num_gates,) * 2))
        self.gate_up.finish()
        self.down.finish()

    @property
    def dispatches(self) -> bool:
        """Whether rows are dispatched between ranks: only for experts."""
        return False

    def defer_all_reduce(self, *, deferred: bool = True) -> None:
        self.down.defer_all_reduce(deferred=deferred)

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape, all-reduced unless deferred."""
        return self.down(self._gate(self.gate_up(x)))

    def run_row(self, kernels: RowKernels, residual: Tensor, norm: RMSNorm) -> None:
        """Adds the layer's output for the normalized `residual` to it, in fused kernels; for steps of one token."""
        gated = kernels.linear(residual, self.gate_up, norm=norm, gated=True)
        kernels.linear_into(residual, gated, self.down)
