"""Decides whether kernels are compiled ahead of use, at the first start of a model on a machine, and for what.

Triton compiles a kernel at the first call with its argument types: 20 kernels in sequence take 15 s at the first start
on a machine (later starts find them on disk). Each kernel's module yields its calls (calls.py); processes.py compiles
several at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from quire.kernels.triton.precompile.shapes import ModelShape

SOURCES = Path(__file__).parent.parent
MOST_PROCESSES = 12
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True)
class Missing:
    """Kernels of a model's shape to compile on this machine, by how many processes, and the marker to leave
    afterwards."""

    shape: ModelShape
    capability: int  # GPU capability: 90 for 9.0
    num_processes: int
    marker: Path

    def leave_marker(self) -> None:
        """Marks this shape as compiled on disk."""
        with contextlib.suppress(OSError):
            self.marker.touch()


def missing(shape: ModelShape, num_cores: int, capability: int | None) -> Missing | None:
    """Returns what to compile for `shape`; None without a GPU, spare cores or a writable cache, or if a marker says
    that everything is compiled. `capability`: of the GPU, as returned by device_capability()."""
    count = min(MOST_PROCESSES, num_cores * 3 // 4)
    if capability is None or count < 2:
        return None
    try:
        marker = _marker(shape, capability)
    except OSError:  # the cache directory is not writable
        return None
    if marker.exists():
        return None
    return Missing(shape, capability, count, marker)


def device_capability() -> int | None:
    """Returns 10 * major + minor of GPU 0 from the driver alone, because torch would allocate GPU memory; None without
    a driver or GPU."""
    cuda = driver_library()
    if cuda is None:
        return None
    device, major, minor = (ctypes.c_int() for _ in range(3))
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
    )
    return None if failed else 10 * major.value + minor.value


def driver_library() -> ctypes.CDLL | None:
    """Returns the loaded libcuda.so.1; None on a host without it."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _marker(shape: ModelShape, capability: int) -> Path:
    """Returns the marker file's path, named by a digest of shape, capability, versions and the kernels' sources;
    creates its folder. Raises OSError."""
    digest = hashlib.sha256(repr((shape, capability, triton.__version__, torch.__version__)).encode())
    for source in sorted(SOURCES.rglob("*.py")):
        digest.update(source.read_bytes())
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"quire-{digest.hexdigest()[:32]}.compiled"
