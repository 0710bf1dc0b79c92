"""`quire up`: runs a cluster in the foreground."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from queue import SimpleQueue

from quire.cluster import Cluster, StartAborted
from quire.flags import cluster_flags
from quire.flags.parser import CommandParser
from quire.shared import logs
from quire.shared.process.lifecycle import EXIT_FORCED


def configure(parser: CommandParser) -> None:
    cluster_flags.configure(parser)


def ready_line(cluster: Cluster, *, json: bool) -> str:
    """Returns the line that reports all addresses, as text or as a JSON log line."""
    addresses = cluster.addresses
    if json:
        return logs.as_json("quire", "ready", **addresses)
    return " ".join(["quire ready", *(f"{kind}={address}" for kind, address in addresses.items())])


def report_failure(line: str) -> None:
    """Logs, as JSON, why a process of the cluster ended, cannot be started or does not drain."""
    logs.print_line(logs.as_json("quire", line, level="error"), sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    """Starts a cluster, prints the ready line, and drains on the first SIGTERM or SIGINT; a second one kills all
    processes."""
    options = cluster_flags.options(arguments)
    json = options.settings["scheduler"].get("log_format") == "json"
    cluster = Cluster(options, report=report_failure if json else None)
    asked: SimpleQueue[None] = SimpleQueue()  # put() may be called from a signal handler during get()
    draining = False

    def on_signal(number: int, _frame: object) -> None:
        """Requests the drain, or aborts a start; a second signal kills all processes and exits. Raises nothing,
        because an exception could surface anywhere in the main thread."""
        nonlocal draining
        if draining:
            cluster.kill()
            os._exit(EXIT_FORCED)
        draining = True
        if not cluster.abort_start():
            os._exit(128 + number)  # exit status as in shells
        asked.put(None)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        cluster.start()
    except StartAborted:
        return 0
    logs.print_line(ready_line(cluster, json=json), sys.stdout)
    asked.get()
    cluster.stop()
    return 0
