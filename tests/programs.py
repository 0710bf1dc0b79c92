"""Runs client programs while a server runs in the test's event loop."""

from __future__ import annotations

import asyncio

PATIENCE_S = 60


async def answered(*command: str) -> tuple[int, str, str]:
    """Returns exit status, standard output and standard error."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode(), err.decode()
