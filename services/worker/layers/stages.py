"""How a model's layers are shared out among the stages of a pipeline, and what stages hand each other.

As in GPipe (arXiv 1811.06965), a stage has layers that follow one another, and what it hands on is the residual stream.
The first stage also has the embedding and the output head: the last one hands hidden states back to it, of the tokens
that somebody reads, so that tokens are sampled where the next step needs them, and a table that is both lies once.
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
    """Hidden states on their way back to the first stage."""

    def wait(self) -> None:
        """Until they are there. One thread, once; raises nothing."""

    def take(self) -> Tensor:
        """[num_rows, hidden_size], for the work that is launched next; waits as long as need be. Raises what the way
        here met."""


class StageLink(Protocol):
    """Between the stages of a pipeline; all rows in the order of steps."""

    def send(self, x: Tensor) -> None:
        """To the next stage, [num_tokens, hidden_size]; `x` must stay as it is."""

    def receive(self, x: Tensor) -> None:
        """From the stage before, into `x` [num_tokens, hidden_size], for the work that is launched next."""

    def send_back(self, x: Tensor) -> None:
        """From the last stage to the first."""

    def expect(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> ReturningStates:
        """What the last stage sends back."""

    def min_over_ranks(self, value: int) -> int:
        """Of all ranks of all stages."""

    def sum_over_ranks(self, value: int) -> int:
        """Over all ranks of all stages."""


class _NoLink:
    """Of a stage that has all layers."""

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
    """A rank's place in a pipeline."""

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
        """Those of this stage. `head_layers`: what the output head weighs, in layers: so many fewer has the first
        stage, which has that. Raises InvalidArgument."""
        if num_layers < self.size:
            text = f"{FIELD}: {self.size} stages need a layer each, the model has {num_layers}"
            raise InvalidArgument(text, field=FIELD)
        bounds = _bounds(num_layers, self.size, head_layers)
        return range(bounds[self.number], bounds[self.number + 1])


def _bounds(num_layers: int, size: int, head_layers: float) -> Sequence[int]:
    """[size + 1] where each stage begins."""
    share = (num_layers + head_layers) / size
    ends = [round(share * stage - head_layers) for stage in range(1, size)]
    bounds = [0]
    for stage, end in enumerate(ends, start=1):
        bounds.append(min(max(end, bounds[-1] + 1), num_layers - (size - stage)))
    return [*bounds, num_layers]


ALL_LAYERS = Stage()
