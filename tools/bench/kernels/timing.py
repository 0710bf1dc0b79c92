"""Times of rival functions, taken in turns, so that whatever else the machine does falls on all of them."""

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
    """One case: medians in microseconds by rival, and what the first one reaches."""

    section: str
    case: str
    microseconds: dict[str, float]
    rate: float  # of the first rival
    unit: str  # of `rate`

    @property
    def ratio(self) -> float:
        """How many times faster the first rival is than the second; nan if it has none."""
        times = list(self.microseconds.values())
        return times[1] / times[0] if len(times) > 1 else float("nan")

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        times = "  ".join(f"{name} {value:10.1f} us" for name, value in self.microseconds.items())
        rate = f"{self.rate:8.1f} {self.unit}" if self.unit else ""
        ratio = f"x{self.ratio:.2f}" if len(self.microseconds) > 1 else ""
        return f"{self.section:10} {self.case:44} {times}  {rate:18} {ratio}"


def medians(rivals: dict[str, Work], seconds: float = 0.3) -> dict[str, float]:
    """Microseconds of each; about `seconds` for all of them together.

    Before its turns a rival rests, so that idle threads of the others have stopped looking for work (OpenMP's go on for
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
