"""What a sampling field may be, and what its sender reads if it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.services.frontend.request.request import Sampling


@dataclass(frozen=True, slots=True)
class Rule:
    """`text` is formatted with the sampling values as `s`."""

    field: str
    holds: Callable[[Sampling], bool]
    text: str
