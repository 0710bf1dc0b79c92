"""An unrelated client: one long stream, and short requests whose first tokens are timed."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

from tests.attacks.calls import BYSTANDER

PAUSE_S = 0.02
STREAM_TOKENS = 400
SHORT = {"prompt": "Hello, how are you?", "max_tokens": 2, "stream": True, "temperature": 0}
LONG = {"prompt": "Count:", "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}


@dataclass
class Noticed:
    """Waiting times of the bystander, in seconds."""

    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # seconds between two pieces of the stream
    refused: list[str] = field(default_factory=list)

    def at(self, share: float) -> float:
        found = sorted(self.first_tokens)
        return found[min(len(found) - 1, int(share * len(found)))] if found else float("inf")

    @property
    def longest_gap(self) -> float:
        return max(self.gaps, default=float("inf"))


class Bystander:
    """Runs the client within `async with`; results are collected in `noticed`, which may be replaced."""

    def __init__(self, http: str) -> None:
        self._host, _, port = http.rpartition(":")
        self._port = int(port)
        self.noticed = Noticed()

    async def __aenter__(self) -> Bystander:
        self._tasks = [asyncio.create_task(work()) for work in (self._keep_asking, self._keep_streaming)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def over(self, seconds: float) -> Noticed:
        """Returns what the client measures within this time."""
        self.noticed = Noticed()
        await asyncio.sleep(seconds)
        return self.noticed

    async def _keep_asking(self) -> None:
        while True:
            started_s = time.monotonic()
            arrivals, status = await self._call(SHORT)
            if status != "200":
                self.noticed.refused.append(status)
            elif arrivals:
                self.noticed.first_tokens.append(arrivals[0] - started_s)
            await asyncio.sleep(PAUSE_S)

    async def _keep_streaming(self) -> None:
        while True:
            await self._call(LONG, self._on_gap)
            await asyncio.sleep(PAUSE_S)

    def _on_gap(self, seconds: float) -> None:
        self.noticed.gaps.append(seconds)

    async def _call(self, body: dict[str, object], on_gap: object = None) -> tuple[list[float], str]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            content = json.dumps(body).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            head += "content-type: application/json\r\n"
            head += f"authorization: Bearer {BYSTANDER}\r\n"
            writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            status = (await reader.readline()).split()[1].decode()
            arrivals: list[float] = []
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    arrivals.append(time.monotonic())
                    if callable(on_gap) and len(arrivals) > 1:
                        on_gap(arrivals[-1] - arrivals[-2])
            return arrivals, status
        finally:
            writer.close()
