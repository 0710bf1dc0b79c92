"""Command `python -m quire.services.worker.warmup.compile_kernels`: compiles the kernels of a worker.

Reads the worker's settings from standard input. It runs in a separate process because a process that compiles for a GPU
without using it is good for nothing else."""

from __future__ import annotations

import sys

from quire.services.worker.warmup import early_init
from quire.shared.errors import QuireError
from quire.shared.settings import WorkerSettings


def main() -> int:
    """Compiles the missing kernels and leaves a marker in Triton's cache; returns the exit status, 1 if the settings
    are invalid or a kernel fails."""
    early_init.start()
    from quire.services.worker.warmup import build_kernels  # imports torch

    try:
        missing = build_kernels.missing(WorkerSettings.model_validate_json(sys.stdin.read()))
    except QuireError:  # reported by the worker
        return 1
    if missing is None:
        return 0
    from quire.kernels.triton.precompile.processes import compile_all

    if not compile_all(missing):
        return 1
    missing.leave_marker()
    return 0


if __name__ == "__main__":
    sys.exit(main())
