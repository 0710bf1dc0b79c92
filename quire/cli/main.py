"""Entry point: selects and runs the subcommand."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quire import interrupts
from quire.cli import standard_streams

if TYPE_CHECKING:
    from argparse import Namespace

INTERRUPTED = 130  # what shells expect after Ctrl-C

# name -> (module, description). Modules are imported only when needed.
COMMANDS = {
    "up": ("quire.cli.up", "start a cluster on this machine and stay in the foreground"),
    "serve": ("quire.cli.up", "alias of up"),
    "demo": ("quire.cli.demo", "start a cluster, chat with it, show its status, stop it"),
    "doctor": (
        "quire.cli.doctor",
        "check this machine, the model and the cluster for problems, with remedies",
    ),
    "size": ("quire.cli.size", "compute the memory that a model needs, and the sequences that fit into GPUs"),
    "top": ("quire.cli.top", "watch a cluster: workers, KV blocks, queues, tokens/s, the oldest requests"),
    "status": ("quire.cli.status", "show every service of a cluster"),
    "pause": ("quire.cli.pause", "pause all workers between two steps; requests wait"),
    "resume": ("quire.cli.pause", "resume paused workers"),
    "weights": ("quire.cli.weights", "load other weights on all workers, without a restart"),
    "sleep": ("quire.cli.sleep", "put all workers to sleep: they release device memory"),
    "wake": ("quire.cli.sleep", "wake sleeping workers: they allocate device memory again and continue"),
    "health": ("quire.cli.health", "check a service's health; exit status 0 if it serves"),
    "chat": ("quire.cli.chat", "talk to the model"),
    "complete": ("quire.cli.complete", "continue a text"),
    "transcribe": ("quire.cli.transcribe", "turn files of sound into text or subtitles"),
    "run-batch": ("quire.cli.run_batch", "process a JSONL file of requests, and resume where an earlier run stopped"),
    "bench": ("quire.cli.bench", "run a benchmark"),
    "quantize": ("quire.cli.quantize", "write a copy of a checkpoint with weights of 8 or 4 bits"),
    "merge-adapter": (
        "quire.cli.merge_adapter",
        "write a copy of a checkpoint with a LoRA adapter merged into its weights",
    ),
    "frontend": ("quire.cli.services", "run a frontend"),
    "scheduler": ("quire.cli.services", "run a scheduler"),
    "worker": ("quire.cli.services", "run a worker"),
    "version": ("quire.cli.version", "print the version"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 1 for errors, or that of an interrupt. Argument errors
    exit with argparse's status 2."""
    standard_streams.hold()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core would write unstructured lines into the log
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        interrupts.exit_quietly_on_interrupt()  # only Python's shutdown remains


def _run(arguments: Sequence[str]) -> int:
    """Imports and runs the chosen command; a QuireError is printed on stderr as one line and gives status 1. An
    interrupt during imports ends the process at once."""
    with _ended_by_interrupts():
        from quire.shared.errors import QuireError

    try:
        with _ended_by_interrupts():
            parsed = _parse(arguments)
            run = importlib.import_module(COMMANDS[parsed.command][0]).run
        return int(run(parsed))
    except QuireError as error:
        print(f"quire: {error.message}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Exits at once on Ctrl-C while modules are imported: nothing is lost yet, and a KeyboardInterrupt could surface
    as another error, such as a RuntimeError in a class body or an ImportError of a compiled module."""
    known = (signal.default_int_handler, signal.SIG_DFL) if interrupts.IS_COMMAND else (signal.default_int_handler,)
    raises = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in known
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _parse(arguments: Sequence[str]) -> Namespace:
    """Parses the arguments; only the module of the chosen command is imported, for a fast start. Unknown arguments
    end the process with a suggestion."""
    from quire.flags.parser import CommandParser
    from quire.shared.version import version_text

    parser = CommandParser("quire", description="LLM inference as gRPC services.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=version_text())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in arguments if not word.startswith("-")), "")
    chosen = parser
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == wanted:
            importlib.import_module(module).configure(command)
            chosen = command
    parsed, left_over = parser.parse_known_args(arguments)
    if left_over:
        chosen.refuse(left_over)
    return parsed
