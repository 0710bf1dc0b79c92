"""How rows are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChoiceColumns:
    """Of some rows, [num_rows] on the device, as quire.kernels.reference.sample wants them; None where no row
    uses one."""

    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    most_kept: int = 0  # by a row that has top_k or top_p, if they are few; 0: they may be many

    @property
    def have_filters(self) -> bool:
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    def of(self, rows: Tensor | slice) -> ChoiceColumns:
        temperature, top_k, top_p, min_p = (None if column is None else column[rows] for column in self.all)
        return ChoiceColumns(temperature, top_k, top_p, min_p, self.most_kept)

    @property
    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        return self.temperature, self.top_k, self.top_p, self.min_p
