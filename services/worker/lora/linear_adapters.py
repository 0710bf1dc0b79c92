"""What adapters add to one linear layer, whose parts may be several projections side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.lora.peft_folder import LowRank
from services.worker.lora.step_rows import StepRows


@dataclass(slots=True)
class FusedLowRank:
    """Of all parts of a layer: (x @ down.T) @ up.T"""

    down: Tensor  # [ranks of its parts one after the other, in_features]
    up: Tensor  # [out_features of all parts, the same ranks]: blocks along the diagonal


class LinearAdapters:
    """By adapter. Rows of a step that have none are left as they are."""

    def __init__(self, by_number: dict[int, FusedLowRank], step: StepRows) -> None:
        self._by_number, self._step = by_number, step

    def take_rows(self, rows: Tensor) -> None:
        for low_rank in self._by_number.values():
            low_rank.up = low_rank.up[rows]

    def scale(self, factor: float) -> None:
        for low_rank in self._by_number.values():
            low_rank.up = low_rank.up * factor

    def add(self, x: Tensor, result: Tensor) -> None:
        """To `result` [num_tokens, out_features], of x [num_tokens, in_features]: a step's tokens, in its order."""
        for number, tokens in self._step.groups:
            low_rank = self._by_number.get(number)
            if low_rank is None:
                continue
            of_group = x if tokens is None else x.index_select(0, tokens)
            delta = torch.nn.functional.linear(of_group @ low_rank.down.t(), low_rank.up)
            if tokens is None:
                result += delta
            else:
                result.index_add_(0, tokens, delta)


def fuse(parts: Sequence[LowRank | None], sizes: Sequence[int], in_features: int) -> FusedLowRank:
    """`parts`: of each projection, None where the adapter leaves it alone; `sizes`: its out_features."""
    given = [part for part in parts if part is not None]
    up = torch.zeros(sum(sizes), sum(part.down.size(0) for part in given))
    row = column = 0
    for part, size in zip(parts, sizes, strict=True):
        if part is not None:
            rank = part.down.size(0)
            up[row : row + size, column : column + rank] = part.up
            column += rank
        row += size
    return FusedLowRank(torch.cat([part.down for part in given]), up)
