"""Releases and checks tensor memory that is allocated again later."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def deallocate(tensor: Tensor) -> None:
    """Releases the storage of a tensor and of all its views; they keep their shapes and must not be read."""
    tensor.untyped_storage().resize_(0)


def is_empty(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and not tensor.untyped_storage().nbytes()
