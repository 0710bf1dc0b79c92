"""Reads the positions of tensors in a safetensors file."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

MOST_HEADER_BYTES = 100_000_000  # limit of the safetensors library
MOST_TENSORS = 1 << 17  # per file; the largest models have that many in all files together
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place of a contiguous tensor in a file: first byte, size and dtype."""

    path: Path
    start: int
    num_bytes: int
    dtype: torch.dtype | None  # None: a dtype without arithmetic


class TooManyTensors(ValueError):
    """Raised for a file of safetensors with more than MOST_TENSORS."""


def check_count(path: Path, num_tensors: int) -> None:
    """Raises TooManyTensors for a file with more than MOST_TENSORS."""
    if num_tensors > MOST_TENSORS:
        raise TooManyTensors(f"{path} names {num_tensors} tensors; at most {MOST_TENSORS} of a file are read")


def stored_tensors(path: Path, file: int) -> dict[str, StoredTensor]:
    """Reads the header and returns the places of the tensors by name; `file`: an open descriptor.

    Raises ValueError for other formats and TooManyTensors.
    """
    try:
        (num_bytes,) = struct.unpack("<Q", os.pread(file, 8, 0))
        text = os.pread(file, num_bytes if num_bytes <= MOST_HEADER_BYTES else 0, 8)
        check_count(path, text.count(b'"data_offsets"'))
        header = json.loads(text)
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = StoredTensor(path, 8 + num_bytes + begin, end - begin, DTYPES.get(entry.get("dtype")))
        return found
    except TooManyTensors:
        raise
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file of safetensors: {error!r}") from None
