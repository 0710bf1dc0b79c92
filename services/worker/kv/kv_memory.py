"""How many KV blocks the measured free memory gives."""

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
CPU_SHARE = 10  # a tenth of what is free: the host has other things to do
MAX_CPU_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one block costs, all layers together."""

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
    """Of so many layers that `spec` is of."""
    num_parts = 1 if spec.latent_rank else 2
    return BlockShape(num_layers, spec.block_size, spec.num_kv_heads, spec.head_dim, dtype, num_parts)


def cpu_budget(wanted_gib: float) -> int:
    """Bytes for KV in host memory: what was asked for, else a tenth of what is free, at most 4 GiB. Raises
    InvalidArgument for more than the host has."""
    if wanted_gib:
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if wanted_gib * GIB > has:
            free, there = free_host_bytes() / GIB, has / GIB
            text = f"this host has {there:.1f} GiB of memory, of which {free:.1f} are free"
            raise InvalidArgument(f"cpu_kv_cache_gib: {wanted_gib:g}: {text}", field="cpu_kv_cache_gib")
        return int(wanted_gib * GIB)
    return min(free_host_bytes() // CPU_SHARE, MAX_CPU_BYTES)


def cuda_budget(utilization: float, total_bytes: int, other_bytes: int) -> int:
    """Bytes for KV in GPU memory: the share of it that is ours, less weights, activations and what others hold."""
    return int(total_bytes * utilization) - other_bytes


def reset_cuda_peak_stats() -> None:
    """Loading may have needed more than running will."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measure_cuda_use() -> tuple[int, int]:
    """(bytes in all, bytes that KV cannot have), to be called after the largest steps have been run.

    This process keeps the pool that these steps needed; others have what is in use beyond that.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    others_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved()
    return total_bytes, others_bytes + torch.cuda.max_memory_reserved()


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


def free_host_bytes() -> int:
    """What can be had without swapping, the container's own limit counted in."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used))
    return max(free, 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def report(limits: WorkerLimits, shape: BlockShape) -> None:
    log.info(
        f"KV cache: {limits.num_blocks} blocks of {limits.block_size}, {limits.num_tokens} tokens; "
        f"maximum concurrency for {limits.max_model_len} tokens per sequence: {limits.max_concurrency:.2f}x",
        gib=round(limits.num_blocks * shape.num_bytes / GIB, 2),
    )
