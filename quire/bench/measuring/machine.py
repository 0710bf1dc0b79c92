"""Describes the machine and software versions of a measurement."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from quire.shared.version import VERSION

PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-4", "grpcio", "protobuf", "numpy", "uvloop", "tokenizers")
GIB = 1 << 30


@functools.cache
def describe() -> dict[str, Any]:
    """Returns the processor, cores, memory, load average, and the GPUs with their driver; cached at the first call."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / GIB, 1),
        "load": round(os.getloadavg()[0], 1),
    }
    gpus = [
        line.split(", ") for line in _lines("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    ]
    if gpus:
        machine |= {"gpu": gpus[0][0], "gpus": len(gpus), "driver": gpus[0][1]}
    return machine


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of Quire, Python and relevant installed packages, and the commit of a checkout."""
    found = {"quire": VERSION, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    root = str(Path(__file__).resolve().parents[3])
    commit = _lines("git", "-C", root, "rev-parse", "--short=12", "HEAD")
    return {**found, "commit": commit[0]} if commit else found


def _cpu_name() -> str:
    """Returns the CPU model as the kernel reports it."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine()
    return fields.get("model name") or platform.machine()


def _lines(*command: str) -> list[str]:
    """Returns a command's output lines; empty if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
