"""A command started without standard streams opens no other files under their numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os
from quire.cli.main import main
status = main(["version"])
nothing = os.stat(os.devnull).st_rdev
os._exit(status + sum(os.fstat(number).st_rdev == nothing for number in range(3)))
"""


@pytest.mark.parametrize(("closed", "count"), [("2>&-", 1), (">&-", 1), ("<&- >&- 2>&-", 3)])
def test_what_is_closed_leads_nowhere(closed: str, count: int) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, PROGRAM]
    done = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, check=False)
    assert done.returncode == count
