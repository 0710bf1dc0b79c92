"""Preparation of a worker's memory for sleep mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.services.worker.kv.kv_cache import LayerCache
from quire.services.worker.models.loading.weights import Weights
from quire.services.worker.sleep import tensor_relocation
from quire.services.worker.sleep.cuda_region import CudaRegion, VirtualMemory
from quire.services.worker.sleep.regions import CpuRegion
from quire.services.worker.sleep.sleeper import CudaWeights, HostWeights, SleepableMemory
from quire.shared.errors import FailedPrecondition, InvalidArgument


class SleepMemory:
    """Memory of one rank that can be released. On the CPU any memory qualifies; on a GPU it needs a fixed address."""

    def __init__(self, device: torch.device, weights: Weights, *, enabled: bool) -> None:
        """Relocates the weights, which must have just been loaded and not be referenced by address. Raises
        InvalidArgument if they cannot be relocated."""
        self._device = device
        is_cuda = device.type == "cuda"
        self._virtual = VirtualMemory(device.index or 0) if enabled and is_cuda else None
        self._can_sleep = enabled or not is_cuda
        self._kv: CudaRegion | None = None
        self._weights = None if self._virtual is None else self._relocate_weights(weights, self._virtual)

    def _relocate_weights(self, weights: Weights, virtual: VirtualMemory) -> CudaRegion:
        """Moves the weights into a new CudaRegion, piece by piece, so that little more than one copy exists at a time.
        Raises InvalidArgument if they cannot be read again later."""
        try:
            weights.check_updatable()
        except FailedPrecondition as error:
            raise InvalidArgument(f"enable_sleep_mode: {error.message}", field="enable_sleep_mode") from None
        tensors = weights.tensors()
        region = CudaRegion(tensor_relocation.total_bytes(tensors), virtual)
        region.acquire(1)
        tensor_relocation.relocate(tensors, region.tensor(self._device), region.acquire, _release_cached)
        region.acquire()
        return region

    def zeros(self, num_bytes: int) -> Tensor | None:
        """Returns zeroed uint8 memory [num_bytes] with a fixed address for the KV of all blocks, or None where any
        memory qualifies. Raises ResourceExhausted if the device lacks the memory."""
        if self._virtual is None:
            return None
        self._kv = CudaRegion(num_bytes, self._virtual)
        self._kv.acquire()
        return self._kv.tensor(self._device)[:num_bytes].zero_()

    def sleepable_memory(self, caches: Sequence[LayerCache], weights: Weights) -> SleepableMemory | None:
        """Returns the KV and weights as memory that a Sleeper can release, or None if a GPU was started without sleep
        mode."""
        if not self._can_sleep:
            return None
        if self._kv is not None and self._weights is not None:
            return SleepableMemory(_ZeroedRegion(self._kv, self._device), CudaWeights(self._weights, self._device))
        parts = [part for cache in caches for part in cache.parts]
        return SleepableMemory(CpuRegion(parts), HostWeights(weights.tensors, weights.check_updatable))

    def release_cached(self) -> None:
        """Releases memory that torch caches."""
        if self._device.type == "cuda":
            _release_cached()


class _ZeroedRegion:
    """Region that is zeroed when acquired: new GPU pages contain old data."""

    def __init__(self, region: CudaRegion, device: torch.device) -> None:
        self._region, self._device = region, device
        self.num_bytes = region.num_bytes

    def release(self) -> None:
        self._region.release()

    def acquire(self) -> None:
        self._region.acquire()
        self._region.tensor(self._device).zero_()


def _release_cached() -> None:
    """Waits for the GPU and frees torch's cached memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
