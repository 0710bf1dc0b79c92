"""Which tokens of the step that is computed now go through which adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from kernels.reference.low_rank import AdaptedRows


@dataclass(slots=True)
class StepRows:
    """Written by the runner before a forward pass, read by linear layers."""

    # On the CPU: in memory that stays where it is, which a tape reads at every replay.
    rows: AdaptedRows | None = None
    # Elsewhere: an adapter's number and the int32 indices of its tokens; None: all of them.
    groups: Sequence[tuple[int, Tensor | None]] = ()

    @contextmanager
    def during(self, groups: Sequence[tuple[int, Tensor | None]]) -> Iterator[None]:
        self.groups = groups
        try:
            yield
        finally:
            self.groups = ()
