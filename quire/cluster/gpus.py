"""Which GPUs each worker on this machine sees: as many as it has ranks, others than the workers before it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
PATIENCE_S = 30.0


def visible(environ: Mapping[str, str] | None = None) -> list[str]:
    """Their names, as the variable takes them; empty where nobody knows of any."""
    named = (os.environ if environ is None else environ).get(VARIABLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    command = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def of_worker(index: int, num_ranks: int, gpus: Sequence[str]) -> str:
    """What the variable says for one worker; empty: as it is. Where there are too few for all workers, they share."""
    groups = len(gpus) // num_ranks
    if groups < 2:
        return ""
    first = index % groups * num_ranks
    return ",".join(gpus[first : first + num_ranks])
