"""Feed-forward layers, with gates and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from services.worker.layers.activation import SILU, activate, gated
from services.worker.layers.linear import Linear, Part

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.layers.placement import Placement
    from services.worker.layers.rms_norm import RMSNorm
    from services.worker.models.single_row import RowKernels


class PlainMLP:
    """down(activation(up(x)))"""

    def __init__(
        self, up: Part, down: Part, hidden_size: int, bias: bool, place: Placement, *, activation: str
    ) -> None:
        self._up = Linear([up], hidden_size, bias, place)
        self._down = Linear([down], up.out_features, bias, place)
        self._activate = activate(activation, place)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._up.destinations()
        yield from self._down.destinations()

    def finish(self) -> None:
        self._up.finish()
        self._down.finish()

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._up(x)))


class MLP:
    """down(activation(gate(x)) * up(x))"""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        place: Placement,
        *,
        activation: str = "silu",
        fused: bool = False,
        scale: float = 1.0,
    ) -> None:
        """`fused`: gate and up are one tensor in the checkpoint. `scale`: of what the layer gives."""
        gate_up = [Part(f"{name}.gate_proj", intermediate_size), Part(f"{name}.up_proj", intermediate_size)]
        if fused:
            gate_up = [Part(f"{name}.gate_up_proj", 2 * intermediate_size)]
        self._scale = scale
        self._gate = place.ops.silu_mul if activation in SILU else gated(activation, place)
        self.gate_up = Linear(gate_up, hidden_size, bias, place)
        self.down = Linear([Part(f"{name}.down_proj", hidden_size)], intermediate_size, bias, place)

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.gate_up.destinations()
        yield from self.down.destinations()

    def finish(self) -> None:
        if self._scale != 1:
            self.down.scale(self._scale)
        self.gate_up.finish()
        self.down.finish()

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._gate(self.gate_up(x)))

    def run_row(self, kernels: RowKernels, residual: Tensor, norm: RMSNorm) -> None:
        """Of a step of one token, in fused kernels: what it makes of the normalised `residual` is added to that."""
        gated = kernels.linear(residual, self.gate_up.packed, norm=norm, gated=True)
        kernels.linear(gated, self.down.packed, residual=residual)
