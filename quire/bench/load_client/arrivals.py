"""Arrival patterns: all requests at once, a fixed number in flight, or a rate."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import accumulate

from quire.shared.errors import InvalidArgument

SEED = 7


@dataclass(frozen=True, slots=True)
class ArrivalPattern:
    """`burst`: all at once. `8`: at most 8 in flight, the next when one ends. `20/s`: Poisson arrivals, 20 per
    second."""

    text: str
    in_flight: int = 0  # 0: no limit
    rate: float = 0.0  # requests a second; 0: as soon as the limit allows

    def offsets_s(self, count: int) -> list[float]:
        """Returns the arrival time of each request in seconds after the start: all 0, or a Poisson process with a
        fixed seed."""
        if not self.rate:
            return [0.0] * count
        draw = random.Random(SEED)
        return list(accumulate(draw.expovariate(self.rate) for _ in range(count)))

    def share(self, client: int, clients: int) -> int:
        """Returns how many of the requests in flight client process number `client` may have; 0 without a limit."""
        return self.in_flight // clients + (client < self.in_flight % clients)

    def most_clients(self, wanted: int) -> int:
        """Returns the number of client processes that can be kept busy."""
        return min(wanted, self.in_flight) if self.in_flight else wanted


def parse(text: str) -> ArrivalPattern:
    """Parses `burst`, `N` (requests in flight) or `N/s` (Poisson arrivals); raises InvalidArgument for anything
    else."""
    if text == "burst":
        return ArrivalPattern(text)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)/s", text)
    if match and float(match[1]) > 0:
        return ArrivalPattern(text, rate=float(match[1]))
    if text.isdigit() and int(text) > 0:
        return ArrivalPattern(text, in_flight=int(text))
    raise InvalidArgument(
        f"load: {text!r} is not a load; give burst, N (requests in flight) or N/s (Poisson arrivals)", field="load"
    )
