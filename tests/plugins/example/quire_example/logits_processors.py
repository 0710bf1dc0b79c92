"""Logits processor that allows only tokens whose id is a multiple of the request's argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Multiples:
    """Takes the argument {"of": N}."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._ids = torch.arange(vocab_size, device=device)
        self._of: dict[int, int] = {}

    def admit(self, slot: int, arguments: Mapping[str, Any], admission: Any) -> None:
        if set(arguments) != {"of"} or not isinstance(arguments["of"], int) or arguments["of"] < 1:
            raise ValueError(f"takes one argument, of, a whole number over 0; got {dict(arguments)}")
        self._of[slot] = arguments["of"]

    def release(self, slot: int) -> None:
        self._of.pop(slot, None)

    def bind(self, slots: Any) -> BoundMultiples | None:
        of = {row: self._of[slot] for row, slot in enumerate(slots.tolist()) if slot in self._of}
        return BoundMultiples(self._ids, of) if of else None


class BoundMultiples:
    """Rows of a step that name the processor."""

    def __init__(self, ids: torch.Tensor, of: dict[int, int]) -> None:
        self._rows = torch.tensor(list(of), device=ids.device)
        divisors = torch.tensor(list(of.values()), device=ids.device)
        self._banned = ids[None] % divisors[:, None] != 0  # [num_active, vocab_size]

    def apply(self, logits: torch.Tensor, positions: Any) -> None:
        logits[self._rows] = logits[self._rows].masked_fill(self._banned, float("-inf"))

    def sampled(self, token_ids: torch.Tensor) -> None:
        """Does nothing: the processor does not depend on earlier tokens."""
