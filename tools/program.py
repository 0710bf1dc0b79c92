"""Runs a program of this folder as `quire` runs its commands: one line for an error, no usage, no traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from quire.flags.parser import CommandParser
from quire.shared.errors import QuireError

Configure = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]


def main(name: str, text: str, configure: Configure, run: Run, arguments: Sequence[str] | None = None) -> int:
    """Parses the command line and runs the program; a QuireError is printed as one line and gives exit status 1."""
    parser = CommandParser(name, description=text, allow_abbrev=False)
    configure(parser)
    parsed, left_over = parser.parse_known_args(arguments)
    if left_over:
        parser.refuse(left_over)
    try:
        return run(parsed)
    except QuireError as error:
        print(f"{name.rsplit('.', maxsplit=1)[-1]}: {error.message}", file=sys.stderr)
        return 1
