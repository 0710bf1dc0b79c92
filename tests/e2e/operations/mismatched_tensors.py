"""Tensors that a trainer announces correctly and sends as something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SentAs:
    """Is announced as `tensor`; `send` returns the tensor sent instead, None: nothing is sent."""

    def __init__(self, tensor: Any, send: Callable[[Any], Any]) -> None:
        self.tensor, self._send = tensor, send

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def numel(self) -> int:
        """Number of elements; trainers do not send tensors without elements."""
        self._sent = self._send(self.tensor)
        return 0 if self._sent is None else int(self.tensor.numel())

    def detach(self) -> Any:
        return self._sent


def with_odd(tensors: dict[str, Any], name: str, send: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns all `tensors`, where `name` is sent as something else."""
    return tensors | {name: SentAs(tensors[name], send)}
