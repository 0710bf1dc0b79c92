"""Compiles missing kernels in several processes that take one call after the other.

Triton's functions are called on tensors without memory, for the present GPU but without using it, and every call stops
at the compiled kernel. Kernels that are not listed are compiled at their first call as usual. Triton 3.6 (not 3.9) also
calls the C compiler for argument launchers: 27 times another third of a second, which is done here, too.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import cache, driver
from triton.runtime.jit import JITFunction

from quire.kernels.triton.precompile.calls import precompile_calls
from quire.kernels.triton.precompile.precompile import Missing, driver_library
from quire.kernels.triton.precompile.shapes import Call


class AbsentGpu:
    """Replacement of Triton's driver: names the target to compile for and launches nothing."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_all(missing: Missing) -> bool:
    """Compiles everything missing in forked processes; returns whether all succeeded. Replaces Triton's driver and
    launcher, so the calling process is unusable afterwards."""
    cache.triton_key()  # once before forking: reads all of Triton
    driver.set_active(AbsentGpu(missing.capability))
    run, links = JITFunction.run, driver_library() is not None
    builds_launchers = links and hasattr(nvidia, "make_launcher")

    def compile_only(*arguments: Any, **options: Any) -> Any:
        """Compiles the kernel for these arguments instead of launching it, with its C launcher where Triton needs
        one."""
        kernel = run(*arguments, **{**options, "warmup": True})
        if builds_launchers:
            _leave_on_disk(lambda: nvidia.CudaLauncher(kernel.src, kernel.metadata))
        return kernel

    JITFunction.run = compile_only
    work: list[Call] = [*precompile_calls(missing.shape)]
    if links:
        work.append(lambda: _leave_on_disk(nvidia.CudaUtils))
    return _share(work, missing.num_processes)


def _share(work: Sequence[Call], count: int) -> bool:
    """Distributes calls over `count` forked children; each takes the next one when its last has returned. Returns
    whether all succeeded."""
    taken, given = os.pipe()
    os.write(given, bytes(range(len(work))))
    os.close(given)
    children = [_child(work, taken) for _ in range(count)]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return not any(statuses)


def _child(work: Sequence[Call], taken: int) -> int:
    """Forks a child that runs the calls whose indices it reads from the pipe `taken`, then exits with 1 if one failed;
    returns its process id."""
    process = os.fork()
    if process:
        return process
    succeeded = True
    while index := os.read(taken, 1):
        try:
            work[index[0]]()
        except Exception:
            traceback.print_exc()
            succeeded = False
    sys.stderr.flush()
    os._exit(0 if succeeded else 1)


def _leave_on_disk(build: Call) -> None:
    """Builds Triton's C launchers; if one fails, Triton builds it again at the first call and reports the error."""
    try:
        build()
    except Exception as error:
        print(f"precompile: {error}", file=sys.stderr)
