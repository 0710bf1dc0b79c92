"""Tensors whose memory comes later."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def take_away(tensor: Tensor) -> None:
    """It and its views keep their shapes."""
    tensor.untyped_storage().resize_(0)


def is_empty(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and not tensor.untyped_storage().nbytes()
