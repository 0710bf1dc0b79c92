"""Sleep mode for KV and weights, with vLLM's levels: level 1 moves the weights to host memory, level 2 discards them.

On the CPU level 1 leaves the weights where they are. Addresses stay valid, so that CUDA graphs, tapes and shared
tensors work again after waking up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.services.worker.sleep.cuda_region import CudaRegion
from quire.services.worker.sleep.regions import CpuRegion, SleepRegion
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.logs import logger

log = logger("worker.sleep")

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)  # in the order of waking up
LEVELS = (1, 2)


class WeightMemory(Protocol):
    """Memory of the weights, which can be offloaded or discarded."""

    def offload(self) -> None:
        """Level 1: releases device memory and keeps the weights in host memory."""

    def discard(self) -> None:
        """Level 2: releases the memory and loses the weights. Raises FailedPrecondition if they cannot be
        read again."""

    def restore(self, read: Callable[[], None]) -> None:
        """Restores the weights; `read` reads them again if they were lost. Raises QuireError, and then they stay
        asleep."""


class HostWeights:
    """Weights in CPU memory: level 1 leaves them in place, level 2 returns their pages to the kernel."""

    def __init__(self, tensors: Callable[[], list[Tensor]], check: Callable[[], None]) -> None:
        """`check` raises FailedPrecondition if the weights cannot be read again."""
        self._tensors, self._check = tensors, check
        self._lost: CpuRegion | None = None

    def offload(self) -> None:
        """No-op: the weights are in host memory already."""

    def discard(self) -> None:
        """Releases the pages of the weights. Raises FailedPrecondition if the weights cannot be read again."""
        self._check()
        region = CpuRegion(self._tensors())
        region.release()
        self._lost = region

    def restore(self, read: Callable[[], None]) -> None:
        """Acquires discarded memory and reads the weights again; does nothing after level 1. Raises QuireError."""
        if self._lost is not None:
            self._lost.acquire()
            read()
            self._lost = None


class CudaWeights:
    """Weights in a CudaRegion, copied to host memory at level 1."""

    def __init__(self, region: CudaRegion, device: torch.device) -> None:
        self._region, self._device = region, device
        self._on_host: Tensor | None = None
        self._is_asleep = False

    def offload(self) -> None:
        """Copies the weights to host memory, pinned if possible, and releases the region."""
        content = self._region.tensor(self._device)
        try:
            host = torch.empty(content.numel(), dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # too large to be pinned
            host = torch.empty(content.numel(), dtype=torch.uint8)
        self._on_host = host.copy_(content)
        self.discard()

    def discard(self) -> None:
        """Releases the region's pages; without offload() the weights are lost."""
        self._region.release()
        self._is_asleep = True

    def restore(self, read: Callable[[], None]) -> None:
        """Maps the region again and copies the weights back, or reads them if they were discarded. An error releases
        the region again and is raised; does nothing while awake."""
        if not self._is_asleep:
            return
        self._region.acquire()
        try:
            if self._on_host is None:
                read()
            else:
                self._region.tensor(self._device).copy_(self._on_host)
                torch.cuda.synchronize()
        except Exception:
            self._region.release()
            raise
        self._on_host, self._is_asleep = None, False


@dataclass(frozen=True, slots=True)
class SleepableMemory:
    """Memory that a worker can release."""

    kv: SleepRegion
    weights: WeightMemory


class Sleeper:
    """Puts memory to sleep and wakes it up. Called while no step is in flight."""

    def __init__(
        self, memory: SleepableMemory | None, read: Callable[[], None], release_cached: Callable[[], None]
    ) -> None:
        """`memory`: None if memory cannot be released; `read`: reads the weights again; `release_cached`: releases
        cached, unused memory."""
        self._memory, self._read, self._release_cached = memory, read, release_cached
        self._asleep: set[str] = set()
        self._kv_released = False
        self.level = 0

    @property
    def is_awake(self) -> bool:
        """Whether steps can run: nothing sleeps or is released."""
        return not self._asleep and not self._kv_released

    @property
    def asleep(self) -> tuple[str, ...]:
        return tuple(tag for tag in TAGS if tag in self._asleep)

    def sleep(self, level: int) -> None:
        """Puts weights (level 1: offloaded, level 2: discarded) and KV to sleep; what sleeps already is left. Raises
        InvalidArgument for other levels, FailedPrecondition if memory cannot be released or the weights sleep at
        another level."""
        if level not in LEVELS:
            raise InvalidArgument(f"level: must be 1 or 2, got {level}", field="level")
        if self._memory is None:
            text = "enable_sleep_mode: this worker was started without it, so its memory cannot be released"
            raise FailedPrecondition(text, field="enable_sleep_mode")
        if WEIGHTS in self._asleep and level != self.level:
            raise FailedPrecondition(
                f"level: the weights already sleep at level {self.level}; wake them up first", field="level"
            )
        if WEIGHTS not in self._asleep:
            (self._memory.weights.offload if level == 1 else self._memory.weights.discard)()
            self._asleep.add(WEIGHTS)
        if KV_CACHE not in self._asleep:
            self._memory.kv.release()
            self._asleep.add(KV_CACHE)
        self.level = level
        self._release_cached()
        log.info("asleep", level=level)

    def wake_up(self, tags: Iterable[str]) -> None:
        """Wakes up memory by tag; no tags mean all. Raises InvalidArgument for unknown tags and ResourceExhausted; tags
        woken before the error stay awake. Does nothing if memory cannot be released."""
        wanted = {*tags} or {*TAGS}
        unknown = sorted(wanted - {*TAGS})
        if unknown:
            raise InvalidArgument(f"tags: must be {' or '.join(TAGS)}, got {unknown[0]!r:.40}", field="tags")
        if self._memory is None:
            return
        for tag in TAGS:
            if tag in wanted & self._asleep:
                if tag == WEIGHTS:
                    self._memory.weights.restore(self._read)
                else:
                    self._memory.kv.acquire()
                self._asleep.discard(tag)
        if not self._asleep:
            self.level = 0
        log.info("awake", tags=sorted(wanted))

    def check_weights(self) -> None:
        """Raises FailedPrecondition while the weights sleep."""
        if WEIGHTS in self._asleep:
            raise FailedPrecondition('the weights are asleep; wake them up first (tags ["weights"])')

    def release_kv_for_staging(self) -> None:
        """Releases the KV memory until restore_kv(), to make space for staged weights; does nothing if it sleeps or
        cannot be released."""
        if self._memory is not None and KV_CACHE not in self._asleep and not self._kv_released:
            self._memory.kv.release()
            self._kv_released = True

    def restore_kv(self) -> None:
        """Acquires the KV memory, zeroed, that release_kv_for_staging() released; does nothing otherwise. Raises
        ResourceExhausted."""
        if self._kv_released and self._memory is not None:
            self._release_cached()
            self._memory.kv.acquire()
            self._kv_released = False
