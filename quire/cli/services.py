"""`quire frontend`, `quire scheduler`, `quire worker`: one service, in this process."""

from __future__ import annotations

import argparse
import functools
import importlib

from quire.cli.flags import add_settings
from shared import lifecycle
from shared.settings import SERVICES, load


def configure(parser: argparse.ArgumentParser) -> None:
    role = parser.prog.split()[-1]
    parser.add_argument(
        "--config", default=argparse.SUPPRESS, metavar="FILE", help="YAML file with a section per service"
    )
    add_settings(parser, SERVICES[role])


def run(arguments: argparse.Namespace) -> int:
    flags = vars(arguments)
    role = flags.pop("command")
    settings = load(SERVICES[role], SERVICES, flags)
    serve = importlib.import_module(settings.main_module).serve
    return lifecycle.run(functools.partial(serve, settings))
