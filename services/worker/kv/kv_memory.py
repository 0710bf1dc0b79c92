"""Sizing of the KV cache from measured free memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.services.worker.attention.port import AttentionSpec
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger

log = logger("worker.memory")

GIB = 1 << 30
CPU_SHARE = 10  # use a tenth of free host memory; the rest serves other processes
MAX_CPU_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of one block over all layers of a page, and its size in bytes."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of keys and values
    num_parts: int = 2  # keys and values; 1: latent vectors, which are both

    @property
    def num_bytes(self) -> int:
        elements = self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return int(self.num_parts * elements * self.dtype.itemsize)


def block_shape(spec: AttentionSpec, num_layers: int, dtype: torch.dtype) -> BlockShape:
    """Returns the shape of a block for `num_layers` layers of `spec`."""
    num_parts = 1 if spec.latent_rank else 2
    return BlockShape(num_layers, spec.block_size, spec.num_kv_heads, spec.head_dim, dtype, num_parts)


def cpu_budget(wanted_gib: float, free_bytes: int | None = None) -> int:
    """Returns the bytes of host memory for KV: the requested size, else a tenth of free memory, at most 4 GiB. Raises
    InvalidArgument if it exceeds the host's memory. `free_bytes`: free memory, by default as measured now."""
    free_bytes = free_host_bytes() if free_bytes is None else free_bytes
    if wanted_gib:
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if wanted_gib * GIB > has:
            free, total = free_bytes / GIB, has / GIB
            text = f"this host has {total:.1f} GiB of memory, of which {free:.1f} are free"
            raise InvalidArgument(f"cpu_kv_cache_gib: {wanted_gib:g}: {text}", field="cpu_kv_cache_gib")
        return int(wanted_gib * GIB)
    return min(free_bytes // CPU_SHARE, MAX_CPU_BYTES)


def cuda_budget(utilization: float, total_bytes: int, other_bytes: int) -> int:
    """Returns the bytes of GPU memory for KV: this worker's share minus weights, activations and other processes' use.
    May be negative."""
    return int(total_bytes * utilization) - other_bytes


def reset_cuda_peak_stats() -> None:
    """Frees cached memory and resets peak statistics: loading may have needed more memory than steps will."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measure_cuda_use() -> tuple[int, int]:
    """Returns (total bytes, bytes unavailable to KV); call it after the largest steps have run.

    This process keeps the pool that these steps needed; the rest of the memory in use belongs to other processes."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    others_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    return total_bytes, others_bytes + torch.cuda.max_memory_reserved()


def free_bytes(device: torch.device) -> int:
    """Returns the free memory of the GPU, or of the host for any other device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def free_host_bytes() -> int:
    """Returns the host memory available without swapping, within the container's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used))
    return max(free, 0)


def _read(path: str) -> str:
    """Returns the text of a file, "" if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def report(limits: WorkerLimits, shape: BlockShape) -> None:
    """Logs the number of blocks, tokens and full-length sequences that the KV cache holds."""
    log.info(
        f"KV cache: {limits.num_blocks} blocks of {limits.block_size}, {limits.num_tokens} tokens; "
        f"maximum concurrency for {limits.max_model_len} tokens per sequence: {limits.max_concurrency:.2f}x",
        gib=round(limits.num_blocks * shape.num_bytes / GIB, 2),
    )
