"""Runs a third-party program so that it ends with its launcher, however the launcher dies: `python parent_watch.py
PROGRAM ARGUMENT...`

stdin is a pipe that the launcher holds. A second process waits for the end of either and ends the program if the
launcher died first. The program keeps the process id that the launcher knows. Run by path and without imports of
Quire, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

LAUNCHER = 0  # stdin
PATIENCE_S = 1.0  # for a program to exit after SIGTERM; it has no state to save


def main(command: list[str]) -> None:
    """Forks a watcher and replaces this process by the command. The command inherits a pipe whose end shows the
    watcher that it has ended."""
    program = os.getpid()
    ours, programs = os.pipe()
    if os.fork() == 0:
        os.close(programs)
        _watch(program, ours)
        os._exit(0)
    os.close(ours)
    os.set_inheritable(programs, True)  # kept open while the program runs
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, LAUNCHER)
    os.execvp(command[0], command)


def _watch(program: int, its_end: int) -> None:
    """Waits until the program or its launcher ends; if it is the launcher, the program gets SIGTERM and, after
    PATIENCE_S, SIGKILL."""
    _close_outputs()
    ended, _, _ = select.select([LAUNCHER, its_end], [], [])
    if its_end in ended:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, number)
        if select.select([its_end], [], [], PATIENCE_S)[0]:
            return


def _close_outputs() -> None:
    """Closes inherited outputs: a reader of the program's output waits for the program's end, not for this process."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nothing, number)


if __name__ == "__main__":
    main(sys.argv[1:])
