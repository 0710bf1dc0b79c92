"""Kernels are compiled before they are called, at the first start of a model on a machine: whether, and for what.

Triton compiles a kernel when it first meets its arguments' types: 20 kernels one after the other are 15 s at the first
start on a machine (later ones find them on disk). jobs.py lists them, processes.py compiles
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

from quire.kernels.routing import Gate, Routing

SOURCES = Path(__file__).parent.parent
MOST_PROCESSES = 12
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True)
class ExpertsShape:
    """What the kernels of a mixture of experts depend on."""

    num_experts: int
    intermediate_size: int
    routing: Routing
    gate: Gate
    biased: bool
    choice_bias: bool
    shared_is_there: bool
    shared_is_gated: bool
    single_row: bool  # their part of the fused chain is used


@dataclass(frozen=True)
class PackedShape:
    """What the kernels of weights of 4 bits depend on."""

    group_size: int  # 0: a whole row
    zero: float | None  # that all codes have; None: each group its own


@dataclass(frozen=True)
class LatentShape:
    """What the kernels of latent attention depend on."""

    rank: int
    rope: int
    still: int  # elements of a head's queries before those that are rotated


@dataclass(frozen=True)
class ModelShape:
    """What the kernels of a model depend on."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # tokens whose logits this rank has
    qk_norm: bool
    block_size: int
    max_num_seqs: int
    dtype: str  # "bfloat16", ...
    kv_dtype: str
    single_row: bool  # the fused chain is used
    batch_invariant: bool = False  # the kernels of batch_invariant are used
    experts: ExpertsShape | None = None
    latent: LatentShape | None = None
    attention_sinks: bool = False
    softcap: float = 0.0  # of attention's scores
    chunked_windows: bool = False  # of some layers
    is_whole: bool = True  # no other rank has a part of it
    packed: PackedShape | None = None  # of all products but the output head
    num_adapters: int = 0  # of low rank, that there is room for
    has_trees: bool = False  # drafts may be trees


@dataclass(frozen=True)
class Missing:
    """Kernels that nobody has compiled here."""

    shape: ModelShape
    capability: int  # of the GPU: 90 for 9.0
    num_processes: int
    marker: Path

    def leave_marker(self) -> None:
        """All are on disk now: nobody need ask again."""
        with contextlib.suppress(OSError):
            self.marker.touch()


def missing(shape: ModelShape, num_cores: int) -> Missing | None:
    """None where there is no GPU, no core to spare, no disk to keep them on, or everything there already."""
    capability, count = device_capability(), min(MOST_PROCESSES, num_cores * 3 // 4)
    if capability is None or count < 2:
        return None
    try:
        marker = _marker(shape, capability)
    except OSError:  # nothing can be kept on disk
        return None
    if marker.exists():
        return None
    return Missing(shape, capability, count, marker)


def device_capability() -> int | None:
    """Asked of the driver alone, because torch would take memory on the GPU for it."""
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
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _marker(shape: ModelShape, capability: int) -> Path:
    digest = hashlib.sha256(repr((shape, capability, triton.__version__, torch.__version__)).encode())
    for source in sorted(SOURCES.rglob("*.py")):
        digest.update(source.read_bytes())
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"quire-{digest.hexdigest()[:32]}.compiled"
