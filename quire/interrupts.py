"""Ctrl-C in a command that has hardly begun: it ends at once, without a word.

From its start until main() has its own way with signals nothing is lost, and a KeyboardInterrupt would be a page of the
modules that were being imported. So this comes before anything else of the package, and imports nothing that Python
has not loaded itself.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` puts names on, for which it imports a dozen modules
import sys


def _is_command() -> bool:
    """Whether this process is `quire` or `python -m quire`, and no program of somebody else's that imports us."""
    called = sys.argv[0] if getattr(sys, "argv", None) else ""
    if called == "-m":  # of a module that is still being looked for, which this package is on the way to
        return "quire" in sys.orig_argv or "-mquire" in sys.orig_argv
    return called.rpartition("/")[2] == "quire"


IS_COMMAND = _is_command()


def exit_quietly_on_interrupt() -> None:
    """From now on, if Python's own handler is there and not somebody else's, nor none (`nohup`, a shell's `&`)."""
    try:
        if IS_COMMAND and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    except ValueError:  # imported by a thread
        pass


exit_quietly_on_interrupt()
