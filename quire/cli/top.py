"""`quire top`: live view of a cluster in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator

from quire.cli.connection import add_admin, client_of
from quire.client import Client
from quire.shared.errors import QuireError
from quire.top.history import History
from quire.top.view import RED, Palette, lines

OTHER_SCREEN, OWN_SCREEN = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\033[H", "\033[K", "\033[J"


def configure(parser: argparse.ArgumentParser) -> None:
    add_admin(parser)
    parser.add_argument("--interval-s", type=float, default=1.0, metavar="S", help="interval between updates, seconds")
    parser.add_argument(
        "--once", action="store_true", help="print the view once, for scripts; the default without a terminal"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the view once if requested or stdout is no terminal, otherwise redraws it until the user ends it;
    returns 0."""
    with client_of(arguments) as client:
        if arguments.once or not sys.stdout.isatty():
            print("\n".join(_look(client, History(), Palette(coloured=sys.stdout.isatty()))))
        else:
            _watch(client, max(arguments.interval_s, 0.1))
    return 0


def _look(client: Client, history: History, ink: Palette) -> list[str]:
    services = client.status()
    history.add(services, time.monotonic())
    return lines(services, history, shutil.get_terminal_size().columns - 1, ink)


def _look_again(client: Client, history: History, ink: Palette) -> list[str]:
    """Refreshes the view; if the cluster does not answer, shows that and keeps trying."""
    try:
        return _look(client, history, ink)
    except QuireError as error:
        return [ink(RED, error.message)]


def _watch(client: Client, interval_s: float) -> None:
    """Draws until q, Ctrl-C or SIGTERM on the terminal's alternate screen, which is then left."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    history, ink = History(), Palette(coloured=True)
    sys.stdout.write(OTHER_SCREEN)
    try:
        with _single_keys() as keys:
            _draw(client, history, ink, interval_s, keys)
    except KeyboardInterrupt:
        return
    finally:
        sys.stdout.write(OWN_SCREEN)
        sys.stdout.flush()


def _draw(client: Client, history: History, ink: Palette, interval_s: float, keys: int | None) -> None:
    """Redraws the view every `interval_s` seconds until q is typed on `keys`, a file descriptor (None: never); lines
    beyond the terminal are cut."""
    while True:
        shown = _look_again(client, history, ink)[: shutil.get_terminal_size().lines - 1]
        body = "".join(f"{line}{REST_OF_LINE}\n" for line in shown)
        sys.stdout.write(f"{HOME}{body}{REST_OF_SCREEN}")
        sys.stdout.flush()
        if _asked_to_end(keys, time.monotonic() + interval_s):
            return


@contextlib.contextmanager
def _single_keys() -> Iterator[int | None]:
    """Yields the terminal's input key by key without echo; None without a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    tty.setcbreak(keys)
    try:
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def _asked_to_end(keys: int | None, until_s: float) -> bool:
    """Returns whether q was pressed before the next refresh is due."""
    while (left_s := until_s - time.monotonic()) > 0:
        if keys is None:
            time.sleep(left_s)
        elif select.select([keys], [], [], left_s)[0]:
            typed = os.read(keys, 64)
            if not typed or b"q" in typed.lower():
                return True
    return False
