"""Pipeline stages: distribution of layers, and the links between stages.

As in GPipe (arXiv 1811.06965), a stage has consecutive layers and sends the residual stream to the next one. The first
stage also has the embedding and the output head: the last stage returns the hidden states that the heads read, so that
tokens are sampled where the next step needs them, and a tied table is stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FIELD = "pipeline_parallel_size"


class ReturningStates(Protocol):
    """Handle of hidden states on their way from the last stage back to the first."""

    def wait(self) -> None:
        """Blocks until they have arrived or failed; called once, on one thread. Raises nothing."""

    def take(self) -> Tensor:
        """Returns [num_rows, hidden_size] for subsequent work, waiting as necessary. Raises errors of the transfer."""


class StageLink(Protocol):
    """Links between pipeline stages; rows are sent in the order of steps."""

    def send(self, x: Tensor) -> None:
        """Sends [num_tokens, hidden_size] to the next stage; `x` must not change afterwards."""

    def receive(self, x: Tensor) -> None:
        """Receives from the previous stage into `x` [num_tokens, hidden_size], for subsequent work."""

    def send_back(self, x: Tensor) -> None:
        """Sends hidden states from the last stage to the first."""

    def expect(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> ReturningStates:
        """Returns a handle to the hidden states that the last stage will send back."""

    def min_over_ranks(self, value: int) -> int:
        """Returns the minimum over all ranks of all stages."""

    def sum_over_ranks(self, value: int) -> int:
        """Returns the sum over all ranks of all stages."""


class _NoLink:
    """Links of a stage that has all layers: sending and receiving raise AssertionError."""

    def send(self, x: Tensor) -> None:
        raise AssertionError("there is no other stage")

    def receive(self, x: Tensor) -> None:
        raise AssertionError("there is no other stage")

    def send_back(self, x: Tensor) -> None:
        raise AssertionError("there is no other stage")

    def expect(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> ReturningStates:
        raise AssertionError("there is no other stage")

    def min_over_ranks(self, value: int) -> int:
        return value

    def sum_over_ranks(self, value: int) -> int:
        return value


@dataclass(frozen=True, slots=True)
class Stage:
    """Position of a rank's layers in a pipeline, and its links to the other stages."""

    number: int = 0
    size: int = 1
    link: StageLink = field(default_factory=_NoLink)

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.size - 1

    def layers(self, num_layers: int, head_layers: float) -> range:
        """Returns the half-open range of this stage's layers. Raises InvalidArgument if there are fewer layers than
        stages.

        `head_layers`: cost of the output head in layers; the first stage, which runs it, gets that many fewer.
        """
        if num_layers < self.size:
            text = f"{FIELD}: {self.size} stages need a layer each, the model has {num_layers}"
            raise InvalidArgument(text, field=FIELD)
        bounds = _bounds(num_layers, self.size, head_layers)
        return range(bounds[self.number], bounds[self.number + 1])


def _bounds(num_layers: int, size: int, head_layers: float) -> Sequence[int]:
    """Returns the first layer of each stage and the end, [size + 1]; each stage has at least one layer."""
    share = (num_layers + head_layers) / size
    ends = [round(share * stage - head_layers) for stage in range(1, size)]
    bounds = [0]
    for stage, end in enumerate(ends, start=1):
        bounds.append(min(max(end, bounds[-1] + 1), num_layers - (size - stage)))
    return [*bounds, num_layers]


ALL_LAYERS = Stage()
