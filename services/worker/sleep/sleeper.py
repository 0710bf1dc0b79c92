"""What of a worker sleeps: its KV, its weights. Levels are vLLM's: at 1 weights move to host memory, at 2 they go.

On the CPU the weights are in host memory already and stay at level 1. What sleeps keeps its addresses, so that graphs,
tapes and whoever shares tensors go on when it wakes.
"""

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
TAGS = (WEIGHTS, KV_CACHE)  # in the order in which they wake
LEVELS = (1, 2)


class WeightMemory(Protocol):
    """Where the weights lie."""

    def offload(self) -> None:
        """Level 1."""

    def discard(self) -> None:
        """Level 2. Raises FailedPrecondition where they could not be read again."""

    def restore(self, read: Callable[[], None]) -> None:
        """As they were; `read` reads them again, where they are lost. Raises QuireError; then they still sleep."""


class HostWeights:
    """On the CPU."""

    def __init__(self, tensors: Callable[[], list[Tensor]], check: Callable[[], None]) -> None:
        """`check` raises FailedPrecondition where weights cannot be read again."""
        self._tensors, self._check = tensors, check
        self._lost: CpuRegion | None = None

    def offload(self) -> None:
        """They are where they are to be."""

    def discard(self) -> None:
        self._check()
        region = CpuRegion(self._tensors())
        region.release()
        self._lost = region

    def restore(self, read: Callable[[], None]) -> None:
        if self._lost is not None:
            self._lost.acquire()
            read()
            self._lost = None


class CudaWeights:
    """In a region of their own."""

    def __init__(self, region: CudaRegion, device: torch.device) -> None:
        self._region, self._device = region, device
        self._on_host: Tensor | None = None
        self._is_asleep = False

    def offload(self) -> None:
        content = self._region.tensor(self._device)
        try:
            host = torch.empty(content.numel(), dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # so much cannot be pinned
            host = torch.empty(content.numel(), dtype=torch.uint8)
        self._on_host = host.copy_(content)
        self.discard()

    def discard(self) -> None:
        self._region.release()
        self._is_asleep = True

    def restore(self, read: Callable[[], None]) -> None:
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
    """What a worker can give back."""

    kv: SleepRegion
    weights: WeightMemory


class Sleeper:
    """Told while no step is under way."""

    def __init__(
        self, memory: SleepableMemory | None, read: Callable[[], None], release_cached: Callable[[], None]
    ) -> None:
        """`memory`: None where memory is not such that it could be given back; `read`: reads the weights again;
        `release_cached`: of memory that nobody uses."""
        self._memory, self._read, self._release_cached = memory, read, release_cached
        self._asleep: set[str] = set()
        self._kv_released = False
        self.level = 0

    @property
    def is_awake(self) -> bool:
        """Steps can be run."""
        return not self._asleep and not self._kv_released

    @property
    def asleep(self) -> tuple[str, ...]:
        return tuple(tag for tag in TAGS if tag in self._asleep)

    def sleep(self, level: int) -> None:
        """Raises QuireError, and then nothing sleeps that did not before."""
        if level not in LEVELS:
            raise InvalidArgument(f"level: 1 or 2, not {level}", field="level")
        if self._memory is None:
            text = "enable_sleep_mode: this worker was started without it, so its memory cannot be given back"
            raise FailedPrecondition(text, field="enable_sleep_mode")
        if WEIGHTS in self._asleep and level != self.level:
            raise FailedPrecondition(
                f"level: the weights sleep at level {self.level}: wake them up first", field="level"
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
        """No tags: all. What is awake stays so. Raises QuireError; what has woken up before then is awake."""
        wanted = {*tags} or {*TAGS}
        unknown = sorted(wanted - {*TAGS})
        if unknown:
            raise InvalidArgument(f"tags: {', '.join(TAGS)}, not {unknown[0]!r:.40}", field="tags")
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
        """Raises FailedPrecondition while they sleep."""
        if WEIGHTS in self._asleep:
            raise FailedPrecondition('the weights are asleep: wake them up first (tags ["weights"])')

    def release_kv_for_staging(self) -> None:
        """Its memory is free for a while for weights that are staged, if that can be."""
        if self._memory is not None and KV_CACHE not in self._asleep and not self._kv_released:
            self._memory.kv.release()
            self._kv_released = True

    def restore_kv(self) -> None:
        if self._kv_released and self._memory is not None:
            self._release_cached()
            self._memory.kv.acquire()
            self._kv_released = False
