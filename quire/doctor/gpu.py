"""Checks GPUs: what the driver reports, and whether the installed torch can use them."""

from __future__ import annotations

import importlib.metadata
import subprocess
from collections.abc import Iterator

from quire.doctor.finding import Finding, error, ok, warning

QUERY = "name,driver_version,compute_cap,memory.total,memory.used,mig.mode.current"
OLDEST_CAPABILITY = 8.0  # bfloat16 tensor cores
MOSTLY_FREE = 0.9  # of memory; a worker's default share
PATIENCE_S = 30.0


def check(device: str, num_ranks: int) -> Iterator[Finding]:
    """Yields findings about every GPU and, for device cuda, about torch and the GPUs for `num_ranks` ranks of each
    worker."""
    rows = _devices()
    if not rows:
        yield _no_gpu(device)
        return
    for index, row in enumerate(rows):
        yield from _device(index, row)
    if device == "cuda":
        yield from _ranks(num_ranks, len(rows))
        yield from _packages()


def _devices() -> list[list[str]]:
    """Returns the fields of QUERY for each device; empty without a driver or device."""
    try:
        command = ("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if "," in line]


def _no_gpu(device: str) -> Finding:
    """Returns the finding for a machine without GPU: an error only for device cuda."""
    if device == "cuda":
        advice = "install the NVIDIA driver (in a container: its toolkit, --gpus all), or use --device cpu"
        return error("GPU", "nvidia-smi finds none", advice)
    return ok("GPU", "none found; workers run on the CPU")


def _device(index: int, row: list[str]) -> Iterator[Finding]:
    """Yields findings about one row of nvidia-smi: age, memory in use, and MIG."""
    name, driver, capability, total, used, mig = (*row, *[""] * 6)[:6]
    subject, found = f"GPU {index}", f"{name}, driver {driver}, {total} MiB, compute capability {capability}"
    if _number(capability) < OLDEST_CAPABILITY:
        yield warning(subject, found, "older than Ampere: use --dtype float16; Quire is not measured on it")
    elif _number(used) > (1 - MOSTLY_FREE) * _number(total):
        advice = "end other processes that use it (nvidia-smi), or lower --gpu-memory-utilization"
        yield warning(subject, f"{found}; {used} MiB are in use", advice)
    else:
        yield ok(subject, found)
    if mig == "Enabled":
        yield warning(f"{subject} MIG", "is on", "a worker uses one MIG instance: name it in CUDA_VISIBLE_DEVICES")


def _ranks(num_ranks: int, num_gpus: int) -> Iterator[Finding]:
    """Yields an error if a worker has more ranks than there are GPUs; nothing for a single rank."""
    if num_ranks > num_gpus:
        flags = "--tensor-parallel-size times --pipeline-parallel-size times --context-parallel-size"
        advice = f"{flags} must be at most {num_gpus}, or make more GPUs visible"
        yield error(
            "ranks", f"a worker has {num_ranks} ranks, which need a GPU each, and {num_gpus} are visible", advice
        )
    elif num_ranks > 1:
        yield ok("ranks", f"{num_ranks} of {num_gpus} GPUs for each worker")


def _packages() -> Iterator[Finding]:
    """Yields findings about torch, which must be a CUDA build, and triton."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield error("torch", "is not installed", "pip install 'quire[worker,cuda]'")
        return
    if version.endswith("+cpu"):
        yield error("torch", f"{version} is a build for CPUs", "install a build for CUDA, as the Dockerfile does")
    else:
        yield ok("torch", version)
    try:
        yield ok("triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        yield error("triton", "is not installed", "pip install 'quire[cuda]'")


def _number(text: str) -> float:
    """Converts nvidia-smi's text; 0 if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return 0.0
