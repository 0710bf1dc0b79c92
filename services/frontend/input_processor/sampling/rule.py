"""Rule of a sampling field and its error text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.services.frontend.request.request import Sampling


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of one field; `text` is formatted with the sampling values as `s`."""

    field: str
    holds: Callable[[Sampling], bool]
    text: str
    part: str = ""  # attribute of Sampling without which the rule does not apply; empty: it always applies
