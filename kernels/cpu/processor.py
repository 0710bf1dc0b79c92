"""Features of this machine's CPU, and the cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

# Compiler macro of a feature -> its name in /proc/cpuinfo.
FEATURE_MACROS = {
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__POPCNT__": "popcnt",
    "__MOVBE__": "movbe",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__F16C__": "f16c",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__LZCNT__": "abm",
    "__GFNI__": "gfni",
    "__AVXVNNI__": "avx_vnni",
    "__AVX512F__": "avx512f",
    "__AVX512CD__": "avx512cd",
    "__AVX512BW__": "avx512bw",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512IFMA__": "avx512ifma",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512FP16__": "avx512_fp16",
    "__AVX512VP2INTERSECT__": "avx512_vp2intersect",
}


def features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Returns sorted feature names; empty if the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ()
    named = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return tuple(sorted(set(named.split(":", 1)[1].split())))


def usable_cores() -> int:
    """Returns the physical cores that this process may use, by its affinity and cgroup quota."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, math.ceil(min(len(cores), _quota())))


def _siblings(cpu: int) -> str:
    """Returns the list of hardware threads of a CPU's core, which names the core; the CPU's own number if unknown."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> float:
    """Returns the CPUs granted by the cgroup (v2), possibly fractional; infinity without a limit."""
    try:
        granted, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if granted == "max" else int(granted) / int(period)
