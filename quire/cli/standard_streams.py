"""Handles commands that were started without stdin, stdout or stderr (`quire up 2>&-`)."""

from __future__ import annotations

import os
import sys


def hold() -> None:
    """Opens missing standard streams before anything else, so that no file or socket gets their numbers and receives
    a library's output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number, which is this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 (as long as the process)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
