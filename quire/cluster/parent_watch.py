"""Becomes a program of others that ends with its launcher, however that one dies: `python tied.py PROGRAM ARGUMENT...`

stdin is a pipe that the launcher holds. A process beside the program waits for the end of either and ends the program
if the launcher was first. The program keeps the id that the launcher knows. By path and without imports of ours, so
that it costs nothing to start.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

LAUNCHER = 0  # stdin
PATIENCE_S = 1.0  # with a program that was asked to end, and keeps nothing


def main(command: list[str]) -> None:
    program = os.getpid()
    ours, programs = os.pipe()
    if os.fork() == 0:
        os.close(programs)
        _watch(program, ours)
        os._exit(0)
    os.close(ours)
    os.set_inheritable(programs, True)  # held as long as it runs
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, LAUNCHER)
    os.execvp(command[0], command)


def _watch(program: int, its_end: int) -> None:
    _say_nothing()
    ended, _, _ = select.select([LAUNCHER, its_end], [], [])
    if its_end in ended:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, number)
        if select.select([its_end], [], [], PATIENCE_S)[0]:
            return


def _say_nothing() -> None:
    """Whoever reads what the program writes waits for its end, not for ours."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nothing, number)


if __name__ == "__main__":
    main(sys.argv[1:])
