"""Reads resumable streams over HTTP."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from tests.services.frontend.running import Running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, slowly


class Event(NamedTuple):
    """A server-sent event of a stream."""

    id: int
    data: str


async def read(
    frontend: Running, method: str, path: str, pause: tuple[ScriptedScheduler, int] | None = None, **more: Any
) -> list[Event]:
    """Reads events. `pause`: after this many events the script pauses and the client disconnects."""
    found: list[Event] = []
    async with AsyncExitStack() as stack:
        if pause is not None:
            stack.enter_context(slowly(pause[0]))
        answer = await stack.enter_async_context(frontend.http.stream(method, path, **more))
        assert answer.status_code == 200, await answer.aread()
        number = -1
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                number = int(line.removeprefix("id: "))
            elif line.startswith("data: "):
                found.append(Event(number, line.removeprefix("data: ")))
                if pause is not None and len(found) == pause[1]:
                    pause[0].pause()
                    return found
    return found


async def resumed(frontend: Running, request_id: str, after: int = -1) -> list[Event]:
    return await read(frontend, "GET", f"/v1/streams/{request_id}", params={"starting_after": after})
