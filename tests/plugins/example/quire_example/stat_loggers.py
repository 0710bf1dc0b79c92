"""Stat logger that writes to a file."""

from __future__ import annotations

import os
from pathlib import Path

from quire.services.scheduler.operations.stat_loggers import WorkerStats


def ledger(stats: WorkerStats) -> None:
    """Writes a line for each worker and interval to the file that LEDGER names."""
    with Path(os.environ["LEDGER"]).open("a") as file:
        file.write(f"{stats.worker} {stats.generated_tokens}\n")
