"""Ctrl-C in a command that has just started: exits at once and silently.

Until main() installs its own handling nothing is lost, and a KeyboardInterrupt would print a traceback through the
modules being imported. Therefore this comes before all other imports of the package, and imports nothing that Python
has not already loaded.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` puts names on, for which it imports a dozen modules
import sys


def _is_command() -> bool:
    """Whether this process is `quire` or `python -m quire`, rather than a program that imports the package."""
    called = sys.argv[0] if getattr(sys, "argv", None) else ""
    if called == "-m":  # the module is still being located, inside this package
        return "quire" in sys.orig_argv or "-mquire" in sys.orig_argv
    return called.rpartition("/")[2] == "quire"


IS_COMMAND = _is_command()


def exit_quietly_on_interrupt() -> None:
    """Installs the handler, if Python's own one is active rather than the program's or none (`nohup`, a shell's
    `&`)."""
    try:
        if IS_COMMAND and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    except ValueError:  # imported in a thread other than the main one
        pass


exit_quietly_on_interrupt()
