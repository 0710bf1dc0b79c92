"""The device as torch sees it: selection, dtypes and fatal errors."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.shared.errors import FailedPrecondition, InvalidArgument

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = {"fp8": torch.float8_e4m3fn}
FAST_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # x86 and ARM names in /proc/cpuinfo


@dataclass(frozen=True, slots=True)
class Device:
    """The device that runs the model."""

    kind: str  # "cpu" or "cuda"
    name: str  # hardware name, for display
    index: int = 0  # GPU index

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind) if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def is_synchronous(self) -> bool:
        """Returns whether work has finished when its call returns."""
        return self.kind == "cpu"


def open_device(kind: str, threads: int, index: int = 0) -> Device:
    """Selects the device for the calling thread, which must be the computing one: torch keeps thread counts and the
    current GPU per thread. `threads`: torch's CPU threads, 0: all usable cores; `index`: GPU index. Raises
    FailedPrecondition if torch sees no GPU or too few."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    if kind == "cpu":
        return Device(kind, _cpuinfo("model name") or platform.machine())
    if not torch.cuda.is_available():
        raise FailedPrecondition(f"device: cuda was asked for, but torch sees none: {_why_no_gpu()}", field="device")
    if index >= torch.cuda.device_count():
        raise FailedPrecondition(
            "tensor_parallel_size, pipeline_parallel_size, context_parallel_size: "
            f"rank {index} needs a separate GPU, and torch finds {torch.cuda.device_count()}",
            field="tensor_parallel_size",
        )
    torch.cuda.set_device(index)
    return Device(kind, torch.cuda.get_device_name(index), index)


def _why_no_gpu() -> str:
    """Returns the first sentence of torch's error: built without CUDA, no driver, or a driver that is too old."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).partition("\n")[0].partition(". ")[0]
    return "the driver lists no GPU"


def choose_dtype(wanted: str, checkpoint: str, device: Device) -> torch.dtype:
    """Returns the dtype of weights, activations and KV; `checkpoint` is the dtype in config.json ("" if absent). "auto"
    follows the checkpoint, but on a CPU only for bfloat16 with fast instructions, else float32. Raises InvalidArgument
    for unsupported dtypes."""
    name = wanted if wanted != "auto" else checkpoint or "float32"
    if name not in DTYPES:
        raise InvalidArgument(f"dtype: the checkpoint is {name!r}; supported: {', '.join(DTYPES)}", field="dtype")
    if wanted == "auto" and device.kind == "cpu" and not (name == "bfloat16" and _fast_bfloat16()):
        name = "float32"
    return DTYPES[name]


def choose_kv_dtype(wanted: str, dtype: torch.dtype, device: Device) -> torch.dtype:
    """Returns the dtype of cached keys and values; "auto": that of the weights. Raises InvalidArgument for any other on
    a CPU."""
    if wanted == "auto":
        return dtype
    _require_cuda(device, "kv_cache_dtype", wanted)
    return KV_DTYPES[wanted]


def choose_quantization(wanted: str, checkpoint: str, device: Device) -> str:
    """Returns the quantization applied to weights at load; `checkpoint`: the checkpoint's quantization method, "" for
    floating point. Raises InvalidArgument for a quantized checkpoint or on a CPU, unless `wanted` is "none"."""
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
    """Returns whether the host's CPU has instructions for bfloat16."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return not FAST_BFLOAT16_FLAGS.isdisjoint(flags)


def _cpuinfo(key: str) -> str:
    """Returns a field of the first CPU in /proc/cpuinfo; "" if absent."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def is_fatal_device_error(error: BaseException) -> bool:
    """Returns whether no further work can run on the device in this process after this error."""
    accelerator_error = getattr(torch, "AcceleratorError", ())
    return isinstance(error, accelerator_error) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))
