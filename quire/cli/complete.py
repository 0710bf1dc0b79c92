"""`quire complete TEXT`."""

from __future__ import annotations

import argparse

from quire.cli.connection import add_address, client_of
from quire.cli.sampling import add_sampling, params_of


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="what to continue")
    add_address(parser)
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        print(arguments.text, end="", flush=True)
        for delta in client.stream(arguments.text, params_of(arguments)):
            print(delta.text, end="", flush=True)
    print()
    return 0
