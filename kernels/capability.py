"""Values by the compute capability of a GPU: tuning constants of kernels, and features of a generation. Needs no torch.

A kernel has one table, next to its launch (docs/design/kernels.md, "Another GPU generation").
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Generic, TypeVar

Capability = tuple[int, int]

SM80: Capability = (8, 0)  # A100; 8.6 is A10 and RTX 30, 8.9 is L4, L40 and RTX 40
SM90: Capability = (9, 0)  # H100, H200
SM100: Capability = (10, 0)  # B200; 10.3 is B300, 12.0 is RTX 50

T = TypeVar("T")


@functools.cache
def gpu_capability() -> Capability:
    """Returns the capability that Triton compiles for; SM90 without a GPU, as in Triton's interpreter."""
    from triton.runtime import driver

    try:
        arch = driver.active.get_current_target().arch
    except RuntimeError:  # Triton finds no driver
        return SM90
    return divmod(arch, 10)


class ByCapability(Generic[T]):
    """Table of values by capability.

    A GPU uses the row of the newest capability that is not newer than its own, or the oldest row.
    """

    def __init__(self, rows: Mapping[Capability, T]) -> None:
        """Takes the rows, at least one."""
        self.rows = dict(sorted(rows.items()))

    def of(self, capability: Capability) -> T:
        """Returns the row for a GPU of `capability`: that of the newest known one that is not newer, else the oldest
        row."""
        newest = max((known for known in self.rows if known <= capability), default=min(self.rows))
        return self.rows[newest]

    @functools.cached_property
    def here(self) -> T:
        """Row of this process's GPU: looked up at the first launch, a plain attribute afterwards."""
        return self.of(gpu_capability())
