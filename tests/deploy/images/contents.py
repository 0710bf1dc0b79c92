"""Finds files that an image does not need, which new versions of its components may add."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

OURS = "opt/quire"
UNUSED = {"pip", "setuptools", "wheel", "torch", "transformers", "triton"}  # distributions
REWRITTEN = "numpy"  # whose libraries are not stripped: see the Dockerfile
SYMBOLS = 2  # the type of such a section


def superfluous(root: Path) -> list[str]:
    """Returns superfluous files of the unpacked frontend or scheduler image at `root`."""
    ours = root / OURS
    found = [*_packages(ours), *ours.rglob("tests"), *ours.rglob("*.safetensors"), *_with_symbols(ours)]
    return sorted(str(path.relative_to(root)) for path in found)


def _packages(ours: Path) -> Iterator[Path]:
    for path in ours.glob("lib/python*/site-packages/*"):
        if path.name in UNUSED:
            yield path


def _with_symbols(ours: Path) -> Iterator[Path]:
    for path in ours.rglob("*.so"):
        if not any(part.startswith(REWRITTEN) for part in path.parts) and has_symbols(path.read_bytes()):
            yield path


def has_symbols(library: bytes) -> bool:
    """Whether a 64-bit ELF file has a debug symbol table (System V ABI, chapter 4)."""
    (offset,) = struct.unpack_from("<Q", library, 0x28)
    size, count = struct.unpack_from("<HH", library, 0x3A)
    kinds = (struct.unpack_from("<I", library, offset + size * index + 4)[0] for index in range(count))
    return SYMBOLS in kinds
