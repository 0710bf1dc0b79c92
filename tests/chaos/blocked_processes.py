"""Processes held up at a known moment: whoever opens certain files, or is within a certain function, waits at a pipe
first, until it is let go."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from tests.waiting import accepted, eventually

PATIENCE_S = 60.0


def block_on_open(folder: Path, opened: str) -> Path:
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


def block_in_function(folder: Path, module: str, function: str, body: str) -> Path:
    """The same for who calls a function of a module, such as "Weights._copy": `body` is done in its place, with
    `original`, its `arguments` and wait(), which reads the pipe, if that is there. The pipe."""
    pipe = folder / "pipe"
    (folder / "sitecustomize.py").write_text(f"""
import functools, importlib.machinery, os, sys

def wait():
    if os.path.exists({str(pipe)!r}):
        with open({str(pipe)!r}) as held:
            held.read()

def in_place_of(original):
    @functools.wraps(original)
    def function(*arguments):
{textwrap.indent(body, " " * 8)}
    return function

def hold(module):
    *owners, last = {function!r}.split(".")
    owner = functools.reduce(getattr, owners, module)
    setattr(owner, last, in_place_of(getattr(owner, last)))

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != {module!r}:
            return None
        spec = super().find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            hold(module)

        spec.loader.exec_module = exec_module
        return spec

if {module!r} in sys.modules:  # it was preloaded
    hold(sys.modules[{module!r}])
else:
    sys.meta_path.insert(0, Finder)
""")
    return pipe


async def wait_until_blocked(pipe: Path, *processes: int) -> int:
    """Holds an end to write to, without which nobody gets beyond opening the other one."""

    async def opened() -> int:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)

    writer = await accepted(opened, OSError, patience_s=PATIENCE_S)  # nobody reads yet
    await eventually(lambda: all(reads(process, pipe) for process in processes), patience_s=PATIENCE_S)
    return writer


def reads(process: int, pipe: Path) -> bool:
    """Whether it has it open: it waits for what is written there."""
    links = Path(f"/proc/{process}/fd")
    return any(os.path.realpath(link) == str(pipe) for link in links.iterdir())
