"""Present and peak memory of processes (proc(5): VmRSS, VmHWM; writing 5 to clear_refs resets the latter)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


def _kilobytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def family(pid: int) -> Iterator[int]:
    """Yields the process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from family(int(child))


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory growth in bytes, summed over the processes."""

    most: int
    after: int


class Memory:
    """Measures memory growth since its creation."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = {pid: _kilobytes(pid, "VmRSS") for pid in self._pids}

    def growth(self) -> Growth:
        def grown(name: str) -> int:
            kept = [pid for pid in self._pids if Path(f"/proc/{pid}").exists()]
            return 1024 * sum(_kilobytes(pid, name) - self._before[pid] for pid in kept)

        return Growth(grown("VmHWM"), grown("VmRSS"))
