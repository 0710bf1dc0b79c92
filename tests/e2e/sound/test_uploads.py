"""Many uploads at once: memory is bounded, all are answered, and small ones are not held up by large ones."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest

from tests.e2e.sound.served import ONCE, RATE, Served, floats
from tests.shared.media.audio.files import noise, wav
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COUNT = 200
MIB = 1 << 20
LARGE = wav(np.zeros(60 * RATE, np.float32), RATE)  # a minute of silence, 2 MiB


def resident_bytes(served: Served) -> int:
    """Returns the memory of the frontend's process."""
    page = served.http.get("/metrics").text
    line = next(each for each in page.splitlines() if each.startswith("process_resident_memory_bytes"))
    return int(float(line.split()[-1]))


@pytest.mark.asyncio
async def test_200_uploads_at_once(served: Served) -> None:
    before = resident_bytes(served)
    most = before
    fields = {"temperature": ONCE, "language": "en"}
    async with httpx.AsyncClient(
        base_url=served.base_url, timeout=200, limits=httpx.Limits(max_connections=COUNT)
    ) as http:

        async def send(content: bytes) -> httpx.Response:
            return await http.post("/v1/audio/transcriptions", files={"file": ("a.wav", content)}, data=fields)

        tasks = [asyncio.create_task(send(LARGE)) for _ in range(COUNT)]
        small = asyncio.create_task(send(floats(noise(8_000))))
        while not all(task.done() for task in tasks):
            most = max(most, await asyncio.to_thread(resident_bytes, served))
            await asyncio.wait(tasks, timeout=0.2)
        answers = [task.result() for task in tasks]
        assert (await small).json()["text"]
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert {answer.json()["text"] for answer in answers if answer.status_code == 200} == {""}
    assert most - before < 200 * MIB, "200 bodies of 2 MiB, each twice, are 730 MiB"
    await eventually(lambda: served.http.get("/load").json() == {"server_load": 0})
