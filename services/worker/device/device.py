"""The device as torch sees it: which one, which dtype suits it, how time is measured on it."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from quire.shared.errors import FailedPrecondition, InvalidArgument

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = {"fp8": torch.float8_e4m3fn}
MIN_CORES_TO_SPIN = 4  # the worker's event loop, the thread that launches, the one that waits, and one for the rest
FAST_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86 and ARM names in /proc/cpuinfo


@dataclass(frozen=True, slots=True)
class Device:
    """Where the model runs."""

    kind: str  # "cpu" or "cuda"
    name: str  # of the hardware, for people
    index: int = 0  # among the GPUs

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind) if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def is_synchronous(self) -> bool:
        """Work is done when its call returns."""
        return self.kind == "cpu"


def open_device(kind: str, threads: int, index: int = 0) -> Device:
    """Prepares the calling thread, which must be the one that computes: torch keeps thread counts and the current GPU
    by thread. `index`: of the GPU."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    if kind == "cpu":
        return Device(kind, _cpuinfo("model name") or platform.machine())
    if not torch.cuda.is_available():
        raise FailedPrecondition(f"device: cuda was asked for, but torch sees none: {_why_no_gpu()}", field="device")
    if index >= torch.cuda.device_count():
        raise FailedPrecondition(
            "tensor_parallel_size, pipeline_parallel_size, context_parallel_size: "
            f"rank {index} needs a GPU of its own, and torch sees {torch.cuda.device_count()}",
            field="tensor_parallel_size",
        )
    torch.cuda.set_device(index)
    return Device(kind, torch.cuda.get_device_name(index), index)


def _why_no_gpu() -> str:
    """The first sentence of what torch says: it was built without CUDA, there is no driver, the driver is too old."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0].partition(". ")[0]
    return "the driver lists no GPU"


def choose_dtype(wanted: str, checkpoint: str, device: Device) -> torch.dtype:
    """The dtype of weights, activations and KV; `checkpoint` is the one in config.json ("" if it names none)."""
    name = wanted if wanted != "auto" else checkpoint or "float32"
    if name not in DTYPES:
        raise InvalidArgument(f"dtype: the checkpoint is {name!r}; there are {', '.join(DTYPES)}", field="dtype")
    if wanted == "auto" and device.kind == "cpu" and not (name == "bfloat16" and _fast_bfloat16()):
        name = "float32"
    return DTYPES[name]


def choose_kv_dtype(wanted: str, dtype: torch.dtype, device: Device) -> torch.dtype:
    """The dtype of cached keys and values."""
    if wanted == "auto":
        return dtype
    _require_cuda(device, "kv_cache_dtype", wanted)
    return KV_DTYPES[wanted]


def choose_quantization(wanted: str, checkpoint: str, device: Device) -> str:
    """Returns what is done to weights at load; `checkpoint`: the method that the checkpoint is quantized with, "" for
    floats. Raises InvalidArgument."""
    if wanted != "none":
        if checkpoint:
            raise InvalidArgument(
                f"quantization: {wanted} is for checkpoints of floats; this one is quantized ({checkpoint}) and "
                "needs no setting",
                field="quantization",
            )
        _require_cuda(device, "quantization", wanted)
    return wanted


def _require_cuda(device: Device, field: str, value: str) -> None:
    if device.kind != "cuda":
        raise InvalidArgument(f"{field}: {value} needs device cuda, not {device.kind}", field=field)


def _fast_bfloat16() -> bool:
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return not FAST_BFLOAT16_FLAGS.isdisjoint(flags)


def _cpuinfo(key: str) -> str:
    """The first CPU's value; "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def is_fatal_device_error(error: BaseException) -> bool:
    """After this error nothing will run on the device any more, in this process."""
    accelerator_error = getattr(torch, "AcceleratorError", ())
    return isinstance(error, accelerator_error) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))


class Clock(Protocol):
    """Marks moments in the device's own order of work. Differences are known once the device has passed them."""

    def mark(self) -> Any: ...

    def wait(self, mark: Any) -> None:
        """Until the device has passed the mark."""

    def spans_us(self, marks: list[Any]) -> list[int]:
        """From each mark to the next, all of them passed; they are not asked for again."""


class HostClock:
    """For devices that work synchronously."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def wait(self, mark: int) -> None:
        """It has."""

    def spans_us(self, marks: list[int]) -> list[int]:
        return [(end - start) // 1000 for start, end in pairwise(marks)]


class CudaClock:
    """Events in the current stream."""

    def __init__(self, *, spins: bool) -> None:
        """`spins`: waiting takes a core and ends at once; else the driver wakes the thread, tens of µs late."""
        self._spins = spins
        self._spare: list[Any] = []  # events that have served: several threads take and return them

    def mark(self) -> Any:
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True, blocking=not self._spins)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def spans_us(self, marks: list[Any]) -> list[int]:
        spans = [int(start.elapsed_time(end) * 1000) for start, end in pairwise(marks)]
        self._spare += marks
        return spans


def clock_of(device: Device) -> Clock:
    """A thread waits only while steps are under way: with cores to spare it may spin."""
    if device.is_synchronous:
        return HostClock()
    return CudaClock(spins=len(os.sched_getaffinity(0)) >= MIN_CORES_TO_SPIN)
