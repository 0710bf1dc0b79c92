"""Processes held up at a known moment: whoever opens certain files waits at a pipe first, until it is let go."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

PATIENCE_S = 60.0


def held_up(folder: Path, opened: str) -> Path:
    """A module in `folder` that every process of Python imports first, if that is in PYTHONPATH: who opens a file for
    which `opened` holds, an expression of `path` and `flags`, reads the pipe before, if that is there. The pipe."""
    pipe = folder / "pipe"
    (folder / "sitecustomize.py").write_text(f"""
import os, sys

def on_event(event, arguments):
    if event != "open":
        return
    path, _, flags = str(arguments[0]), *arguments[1:]
    if ({opened}) and os.path.exists({str(pipe)!r}):
        with open({str(pipe)!r}) as held:
            held.read()

sys.addaudithook(on_event)
""")
    return pipe


async def until_read(pipe: Path, *processes: int) -> int:
    """Holds an end to write to, without which nobody gets beyond opening the other one."""
    async with asyncio.timeout(PATIENCE_S):
        writer = -1
        while writer < 0:
            try:
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads yet
                await asyncio.sleep(0.02)
        while not all(reads(process, pipe) for process in processes):
            await asyncio.sleep(0.02)
    return writer


def reads(process: int, pipe: Path) -> bool:
    """Whether it has it open: it waits for what is written there."""
    links = Path(f"/proc/{process}/fd")
    return any(os.path.realpath(link) == str(pipe) for link in links.iterdir())
