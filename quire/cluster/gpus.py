"""Assigns GPUs to the workers of this machine: as many as each has ranks, distinct while they suffice."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
PATIENCE_S = 30.0


def visible(environ: Mapping[str, str] | None = None) -> list[str]:
    """Returns the visible GPUs from CUDA_VISIBLE_DEVICES, else their indices from nvidia-smi; empty if it cannot
    run."""
    named = (os.environ if environ is None else environ).get(VARIABLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    command = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def worker_gpus(index: int, num_ranks: int, gpus: Sequence[str]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for a worker; empty: unchanged. If there are too few GPUs, workers share them."""
    groups = len(gpus) // num_ranks
    if groups < 2:
        return ""
    first = index % groups * num_ranks
    return ",".join(gpus[first : first + num_ranks])
