"""Runs one attack next to an unrelated client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.attacks.bystander import Bystander, Noticed
from tests.attacks.calls import Target
from tests.attacks.memory import Growth, Memory, family

CALM_S = 2.0
BEHIND_S = 0.3


@dataclass(frozen=True, slots=True)
class Outcome:
    """Effect of one attack."""

    name: str
    statuses: dict[str, int]
    num_bytes: int
    seconds: float
    calm: Noticed
    attacked: Noticed
    growth: Growth

    @property
    def later(self) -> float:
        """Delay of the bystander's slowest first token, against the median without attack, in seconds."""
        return self.attacked.at(1) - self.calm.at(0.5)

    def row(self) -> str:
        statuses = ", ".join(s if count == 1 else f"{count} x {s}" for s, count in sorted(self.statuses.items()))
        if self.attacked.refused:
            statuses += f" (others refused: {len(self.attacked.refused)})"
        first = " / ".join(f"{self.attacked.at(share) * 1e3:.0f}" for share in (0.5, 0.99, 1))
        calm = " / ".join(f"{self.calm.at(share) * 1e3:.0f}" for share in (0.5, 0.99, 1))
        gaps = f"{self.calm.longest_gap * 1e3:.0f} → {self.attacked.longest_gap * 1e3:.0f}"
        most, left = self.growth.most / 1e6, self.growth.after / 1e6
        memory = f"{most:.0f} ({self.growth.most / self.num_bytes:.1f} x), {left:.0f}"
        sent = f"{self.num_bytes / 1e6:.1f}"
        return f"| {self.name} | {statuses} | {sent} | {self.seconds:.2f} | {calm} → {first} | {gaps} | {memory} |"


HEADER = (
    "| attack | answers | MB sent | s | first token of others, ms: p50 / p99 / longest, calm → beside it "
    "| longest gap of a stream, ms | memory, MB: most (x what was sent), left |\n|---|---|---|---|---|---|---|"
)


@contextlib.asynccontextmanager
async def attacker(name: str, target: Target) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
    """Starts the attacker process; yields a function that lets it send and returns its report."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "tests.attacks.attacker", name, target.http, target.grpc)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)
    assert process.stdin is not None
    assert process.stdout is not None
    writer, reader = process.stdin, process.stdout

    async def go() -> dict[str, Any]:
        writer.write(b"go\n")
        found: dict[str, Any] = json.loads(await reader.readline())
        return found

    try:
        assert (await reader.readline()) == b"ready\n", f"{name} could not be made"
        yield go
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def measure(name: str, target: Target, pids: Iterable[int], calm_s: float = CALM_S) -> Outcome:
    async with attacker(name, target) as go, Bystander(target.http) as bystander:
        await bystander.over(0.3)
        calm = await bystander.over(calm_s)
        memory = Memory([member for pid in pids for member in family(pid)])
        bystander.noticed = attacked = Noticed()
        answer = await go()
        await asyncio.sleep(BEHIND_S)
        growth = memory.growth()
    return Outcome(name, answer["statuses"], answer["bytes"], answer["seconds"], calm, attacked, growth)
