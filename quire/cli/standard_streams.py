"""stdin, stdout and stderr of a command that was started without some of them (`quire up 2>&-`)."""

from __future__ import annotations

import os
import sys


def hold() -> None:
    """Before anything is opened: the first file or socket would get the free number, and what a library writes to
    stderr would go there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free: this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 (as long as the process)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
