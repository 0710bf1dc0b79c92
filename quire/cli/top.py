"""`quire top`: a cluster, looked at again and again, in any terminal."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time

from quire.cli.connection import add_admin, client_of
from quire.client import Client
from quire.top.history import History
from quire.top.view import RED, Ink, lines
from shared.errors import QuireError

OTHER_SCREEN, OWN_SCREEN = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\033[H", "\033[K", "\033[J"


def configure(parser: argparse.ArgumentParser) -> None:
    add_admin(parser)
    parser.add_argument("--interval-s", type=float, default=1.0, metavar="S", help="between two looks, seconds")
    parser.add_argument("--once", action="store_true", help="one look, for scripts; also where there is no terminal")


def run(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        if arguments.once or not sys.stdout.isatty():
            print("\n".join(_look(client, History(), Ink(coloured=sys.stdout.isatty()))))
        else:
            _watch(client, max(arguments.interval_s, 0.1))
    return 0


def _look(client: Client, history: History, ink: Ink) -> list[str]:
    services = client.status()
    history.add(services, time.monotonic())
    return lines(services, history, shutil.get_terminal_size().columns - 1, ink)


def _look_again(client: Client, history: History, ink: Ink) -> list[str]:
    """A cluster that does not answer now may do so again: the picture says so and goes on."""
    try:
        return _look(client, history, ink)
    except QuireError as error:
        return [ink(RED, error.message)]


def _watch(client: Client, interval_s: float) -> None:
    """Until Ctrl-C or SIGTERM, on the terminal's other screen: what was there before is there again afterwards."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    history, ink = History(), Ink(coloured=True)
    sys.stdout.write(OTHER_SCREEN)
    try:
        while True:
            shown = _look_again(client, history, ink)[: shutil.get_terminal_size().lines - 1]
            body = "".join(f"{line}{REST_OF_LINE}\n" for line in shown)
            sys.stdout.write(f"{HOME}{body}{REST_OF_SCREEN}")
            sys.stdout.flush()
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return
    finally:
        sys.stdout.write(OWN_SCREEN)
        sys.stdout.flush()
