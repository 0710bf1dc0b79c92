"""Page of the commands and their flags, as `--help` prints them."""

from __future__ import annotations

import argparse
import importlib

from quire.cli.main import COMMANDS
from quire.flags.parser import CommandParser
from tools.docs.reference.markdown import cell, code, table

HEAD = """# Commands and flags

`quire COMMAND --help-all` prints the same; `--help` prints the common ones. Settings of a service are flags of `quire
up` and of the service's own command; [Settings](settings.md) explains them.
"""


def page() -> str:
    return f"{HEAD}\n" + "\n".join(_command(name, *described) for name, described in COMMANDS.items())


def _command(name: str, module: str, purpose: str) -> str:
    """Returns a command's section with a table of its flags; hidden flags are left out."""
    parser = CommandParser(prog=f"quire {name}", add_help=False)
    parser.set_defaults(command=name)
    importlib.import_module(module).configure(parser)
    rows = [
        (code(", ".join(action.option_strings) or action.dest), cell((action.help or "").replace("%%", "%")))
        for action in parser._actions
        if action.help != argparse.SUPPRESS
    ]
    text = f"## quire {name}\n\n{purpose[0].upper()}{purpose[1:]}.\n"
    return f"{text}\n{table(('Flag', 'Meaning'), rows)}" if rows else text
