"""Compiled library on disk: its location, its sources, and whether it suits this machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path

from quire.kernels.cpu import processor

HERE = Path(__file__).parent
SOURCES = HERE / "src"
BUILD = HERE / "build"
LIBRARY = "libquire_cpu.so"
STAMP = "stamp.json"


def cached() -> Path:
    """Returns the folder of the user's cache that a first start compiles to, for these sources and this CPU."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "quire" / "kernels" / digest(source_digest(), platform.machine(), *processor.features())


def suitable() -> Path | None:
    """Returns the directory of a library that can be loaded here, or None."""
    return next((directory for directory in (BUILD, cached()) if unsuitable(directory) is None), None)


def sources() -> list[Path]:
    return _found("*.cpp")


def headers() -> list[Path]:
    return _found("*.h")


def _found(pattern: str) -> list[Path]:
    """Returns matching files sorted by name; their folder does not affect the compiled result."""
    return sorted(SOURCES.rglob(pattern), key=lambda path: path.name)


def read_headers() -> bytes:
    return b"".join(path.read_bytes() for path in headers())


def source_digest() -> str:
    """Returns the digest of all sources of the library, without flags."""
    return digest(read_headers(), *(path.read_bytes() for path in sources()))


def digest(*parts: str | bytes) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of the parts, with separators."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
        total.update(b"\0")
    return total.hexdigest()[:16]


def read_stamp(directory: Path) -> dict[str, object]:
    """Returns what the build in `directory` was compiled from and for; empty if there is none."""
    try:
        return json.loads((directory / STAMP).read_text())
    except (OSError, ValueError):
        return {}


def unsuitable(directory: Path = BUILD) -> str | None:
    """Returns why the library in `directory` must not be loaded here (not built, other machine, missing CPU features,
    other sources), or None."""
    stamp = read_stamp(directory)
    if not stamp or not (directory / LIBRARY).exists():
        return "not built: python -m quire.kernels.cpu.build"
    if stamp["machine"] != platform.machine():
        return f"built for {stamp['machine']}, this is {platform.machine()}"
    present = processor.features()
    missing = [need for need in stamp["needs"] if need not in present] if present else []
    if missing:
        return f"built for a CPU with {', '.join(missing)}, which this one lacks: python -m quire.kernels.cpu.build"
    if stamp["sources"] != source_digest():
        return "built from other sources than these: python -m quire.kernels.cpu.build"
    return None
