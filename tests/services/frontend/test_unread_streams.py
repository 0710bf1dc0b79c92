"""Tests of streams whose clients do not read them: they are bounded, do not delay others, and end with their
connections."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually

NUM_CLIENTS = 30
BODY = {"prompt": "x", "max_tokens": 1800, "stream": True, "logprobs": 5, "ignore_eos": True}


async def unread(frontend: Running, model: str) -> socket.socket:
    """Requests a stream with a small receive window, and does not read it."""
    asked = socket.socket()
    asked.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    asked.setblocking(False)
    host, port = frontend.url.removeprefix("http://").rsplit(":", 1)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(asked, (host, int(port)))
    body = json.dumps({"model": model, **BODY}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    await loop.sock_sendall(asked, head.encode() + body)
    return asked


async def test_unread_streams_do_not_delay_others(folder: Path) -> None:
    """Checks sc06, opencti#13908, IBM/mcp-context-forge#1682, vllm-metal#199."""
    script = ScriptedScheduler(count_up, max_model_len=4096)
    async with scheduler(script), running(folder, script.address) as frontend:
        sockets = [await unread(frontend, folder.name) for _ in range(NUM_CLIENTS)]
        async with asyncio.timeout(60):
            await eventually(lambda: len(script.submissions) >= NUM_CLIENTS)
            answer = await frontend.http.post(
                "/v1/completions", json={"model": folder.name, "prompt": "y", "max_tokens": 20, "ignore_eos": True}
            )
            assert answer.status_code == 200
            for one in sockets:
                one.close()
            await frontend.until_idle()
