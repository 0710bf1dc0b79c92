"""`quire complete TEXT`: continues a text."""

from __future__ import annotations

import argparse
import sys

from quire.cli.connection import add_address, client_of
from quire.cli.sampling import add_sampling, params_of
from quire.shared.errors import InvalidArgument


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="what to continue; -: standard input")
    add_address(parser)
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the text and its continuation as it arrives; `-` reads the text from stdin. Raises InvalidArgument for
    an empty text."""
    text = sys.stdin.read() if arguments.text == "-" else arguments.text
    if not text:
        raise InvalidArgument("text: TEXT is empty; give the text to continue", field="text")
    with client_of(arguments) as client:
        print(text, end="", flush=True)
        for delta in client.stream(text, params_of(arguments)):
            print(delta.text, end="", flush=True)
    print()
    return 0
