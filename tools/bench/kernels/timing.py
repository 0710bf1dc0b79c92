"""Timing of rival functions in turns, so that other load on the machine affects all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

Work = Callable[[], object]

ROUNDS = 5
REST = 0.01  # seconds


@dataclass(frozen=True)
class BenchRow:
    """One case: median microseconds by rival, and the rate that the first one reaches."""

    section: str
    case: str
    microseconds: dict[str, float]
    rate: float  # of the first rival
    unit: str  # of `rate`

    @property
    def ratio(self) -> float:
        """Returns how many times faster the first rival is than the second; nan without a second."""
        times = list(self.microseconds.values())
        return times[1] / times[0] if len(times) > 1 else float("nan")

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        """Returns the row as a line: times in microseconds, rate, and the ratio between the rivals."""
        times = "  ".join(f"{name} {value:10.1f} us" for name, value in self.microseconds.items())
        rate = f"{self.rate:8.1f} {self.unit}" if self.unit else ""
        ratio = f"x{self.ratio:.2f}" if len(self.microseconds) > 1 else ""
        return f"{self.section:10} {self.case:44} {times}  {rate:18} {ratio}"


def medians(rivals: dict[str, Work], seconds: float = 0.3) -> dict[str, float]:
    """Returns the microseconds of each rival; takes about `seconds` in all.

    Before its turn a rival pauses, so that idle threads of the others stop spinning (OpenMP's spin for
    milliseconds), and makes one call that does not count.
    """
    single = {name: min(_once(work), _once(work), _once(work)) for name, work in rivals.items()}
    turns = {name: int(min(50, max(1, seconds * 1e6 / len(rivals) / ROUNDS / us))) for name, us in single.items()}
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(ROUNDS):
        for name, work in rivals.items():
            time.sleep(REST)
            work()
            times[name].extend(_once(work) for _ in range(turns[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _once(work: Work) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3
