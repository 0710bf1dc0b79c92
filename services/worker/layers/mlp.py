"""The gated feed-forward layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from services.worker.layers.linear import Linear, Part

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.layers.placement import Placement
    from services.worker.layers.rms_norm import RMSNorm
    from services.worker.models.single_row import RowKernels


class MLP:
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, name: str, hidden_size: int, intermediate_size: int, bias: bool, place: Placement) -> None:
        gate_up = [Part(f"{name}.gate_proj", intermediate_size), Part(f"{name}.up_proj", intermediate_size)]
        self.gate_up = Linear(gate_up, hidden_size, bias, place)
        self.down = Linear([Part(f"{name}.down_proj", hidden_size)], intermediate_size, bias, place)
        self._ops = place.ops

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.gate_up.destinations()
        yield from self.down.destinations()

    def finish(self) -> None:
        self.gate_up.finish()
        self.down.finish()

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._ops.silu_mul(self.gate_up(x)))

    def run_row(self, kernels: RowKernels, residual: Tensor, norm: RMSNorm) -> None:
        """Of a step of one token, in fused kernels: what it makes of the normalised `residual` is added to that."""
        gated = kernels.linear(residual, self.gate_up.packed, norm=norm, gated=True)
        kernels.linear(gated, self.down.packed, residual=residual)
