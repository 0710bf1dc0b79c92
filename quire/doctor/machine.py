"""Checks processor, memory, system limits and clock."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from quire.doctor.finding import Finding, error, ok, warning

GIB = 1 << 30
OLDEST_PYTHON = (3, 11)
FLAGS = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
)  # CPU features used by the kernels
ENOUGH_DESCRIPTORS = 4096  # one connection per client, plus those between services
SHARED_MEMORY = Path("/dev/shm")
CLOCK_UNSYNCHRONIZED = 0x40  # STA_UNSYNC of adjtimex(2)


def check(device: str, *, for_workers: bool) -> Iterator[Finding]:
    """Checks the machine. `for_workers`: include checks that only workers need."""
    yield _python()
    yield _processor(device)
    if for_workers:
        yield from _kernels(device)
    yield _memory()
    yield _descriptors()
    yield from _shared_memory()
    yield _clock()


def _python() -> Finding:
    """Returns an error for a Python older than OLDEST_PYTHON."""
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        return error("python", version, f"install Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer")
    return ok("python", f"{version} at {sys.executable}")


def _processor(device: str) -> Finding:
    """Returns a warning for a CPU worker without AVX2, or for a single core."""
    cores, flags = len(os.sched_getaffinity(0)), _flags()
    found = f"{cores} core{'s' * (cores > 1)} of {platform.machine()}: {' '.join(flags) or 'none of the flags used'}"
    if platform.machine() == "x86_64" and "avx2" not in flags and device == "cpu":
        return warning("processor", found, "the CPU kernels need AVX2; without it plain torch computes, slower")
    if cores < 2:
        return warning(
            "processor", found, "frontend, scheduler and worker share one core: give the machine two or more"
        )
    return ok("processor", found)


def _flags() -> list[str]:
    """Returns those instruction sets among FLAGS that the processor has; empty where /proc/cpuinfo is missing."""
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return [flag for flag in FLAGS if flag in value.split()]
    return []


def _kernels(device: str) -> Iterator[Finding]:
    """Yields whether compiled CPU kernels fit this machine or can be compiled; nothing for other devices."""
    if device != "cpu":
        return
    built, build = (importlib.import_module(f"quire.kernels.cpu.{name}") for name in ("built", "build"))
    if built.suitable() is not None:
        yield ok("CPU kernels", f"compiled for this machine: {built.suitable()}")
    elif build.find_compiler() is not None:
        yield ok("CPU kernels", f"{built.unsuitable()}; the first worker compiles them, which takes a minute")
    else:
        yield warning("CPU kernels", f"{built.unsuitable()}, and no C++ compiler", "install g++ or clang++")


def _memory() -> Finding:
    """Returns a warning if less than 2 GiB are available."""
    free, total = available_memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are available"
    if free < 2 * GIB:
        return warning("memory", found, "a worker needs about 1 GiB in addition to weights and KV: end other processes")
    return ok("memory", found)


def available_memory() -> int:
    """Returns the available memory in bytes, by the kernel's estimate or the control group's limit, whichever is
    less."""
    meminfo = dict(line.split(":", 1) for line in _lines(Path("/proc/meminfo")) if ":" in line)
    free = int(meminfo.get("MemAvailable", "0 kB").split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return free


def _descriptors() -> Finding:
    """Returns a warning if the limit of open files is below ENOUGH_DESCRIPTORS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"a process may open {soft} files (hard limit {hard})"
    if soft < ENOUGH_DESCRIPTORS:
        return warning("descriptors", found, f"run `ulimit -n {ENOUGH_DESCRIPTORS}`, or set LimitNOFILE= of the unit")
    return ok("descriptors", found)


def _shared_memory() -> Iterator[Finding]:
    """Yields a warning if less than 256 MiB are free in shared memory; nothing where it does not exist."""
    if not SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    found = f"{free / GIB:.1f} GiB are free in {SHARED_MEMORY}"
    if free < GIB // 4:
        yield warning(
            "shared memory", found, "ranks of one worker communicate through it: raise --shm-size of the container"
        )
    else:
        yield ok("shared memory", found)


class _Timex(ctypes.Structure):
    """Beginning of struct timex; the kernel writes more fields after it."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 512),
    ]


def _clock() -> Finding:
    """Asks the kernel whether the clock is synchronized; a warning if not."""
    kernel = _Timex()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(kernel)) < 0:
        return ok("clock", "it is unknown whether the clock is synchronized")
    if kernel.status & CLOCK_UNSYNCHRONIZED:
        advice = "run chrony or systemd-timesyncd (in a container: on the host); certificates and traces depend on it"
        return warning("clock", "is not synchronized, according to the kernel", advice)
    return ok("clock", f"synchronized, off by at most {kernel.maxerror / 1000:.0f} ms")


def _lines(path: Path) -> list[str]:
    """Returns the file's lines; empty if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
