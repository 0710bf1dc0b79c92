"""Columns of the step protocols: `bytes` fields that hold little-endian arrays (protos/README.md).

Reading returns a read-only view without copying and raises ColumnError for malformed bytes; writing accepts any
sequence of numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

assert sys.byteorder == "little", "columns are read in place: a big-endian host would have to swap"

NUMBER_BYTES = 4

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


class ColumnError(ValueError):
    """A peer sent a column whose length is not a multiple of the element size."""


def u32(column: bytes) -> U32:
    """Returns a read-only u32 view of a column, without copying. Raises ColumnError if its length is not a multiple
    of 4 bytes."""
    try:
        return np.frombuffer(column, dtype=np.uint32)
    except ValueError:
        raise _malformed(column) from None


def i32(column: bytes) -> I32:
    """Returns a read-only i32 view of a column, without copying. Raises ColumnError if its length is not a multiple
    of 4 bytes."""
    try:
        return np.frombuffer(column, dtype=np.int32)
    except ValueError:
        raise _malformed(column) from None


def f32(column: bytes) -> F32:
    """Returns a read-only f32 view of a column, without copying. Raises ColumnError if its length is not a multiple
    of 4 bytes."""
    try:
        return np.frombuffer(column, dtype=np.float32)
    except ValueError:
        raise _malformed(column) from None


def _malformed(column: bytes) -> ColumnError:
    return ColumnError(f"a column of {len(column)} bytes does not hold numbers of {NUMBER_BYTES} bytes each")


def u32_bytes(values: npt.NDArray[Any] | Sequence[int]) -> bytes:
    return np.asarray(values, dtype=np.uint32).tobytes()


def i32_bytes(values: npt.NDArray[Any] | Sequence[int]) -> bytes:
    return np.asarray(values, dtype=np.int32).tobytes()


def f32_bytes(values: npt.NDArray[Any] | Sequence[float]) -> bytes:
    return np.asarray(values, dtype=np.float32).tobytes()
