"""Processes blocked at a known moment: opening certain files or calling a certain function waits on a pipe until the
test releases it."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from tests.waiting import accepted, eventually

PATIENCE_S = 60.0


def block_on_open(folder: Path, opened: str) -> Path:
    """Installs a module in `folder` that every Python process imports first if PYTHONPATH contains it. Opening a file
    for which the expression `opened` of `path` and `flags` holds reads the pipe first, if it exists. Returns the pipe.
    """
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
    """Blocks calls of a function such as "Weights._copy" in the same way: `body` replaces it and can use `original`,
    its `arguments` and wait(), which reads the pipe, if it exists. Returns the pipe."""
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
    """Waits for a process to open the pipe; holds a writing end, without which open() would block."""

    async def opened() -> int:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)

    writer = await accepted(opened, OSError, patience_s=PATIENCE_S)  # no reader yet
    await eventually(lambda: all(reads(process, pipe) for process in processes), patience_s=PATIENCE_S)
    return writer


def reads(process: int, pipe: Path) -> bool:
    """Returns whether the process has the pipe open, so that it is blocked."""
    links = Path(f"/proc/{process}/fd")
    return any(os.path.realpath(link) == str(pipe) for link in links.iterdir())
