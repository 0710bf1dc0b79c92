"""`quire bench startup`: time from `quire up` to its ready line and to the first token, with a breakdown."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import bundled
from quire.bench.measuring import page_cache
from quire.bench.report import Row, progress
from quire.bench.workload import shapes
from quire.client import Client
from quire.cluster.options import ServiceSpec
from quire.cluster.process import ROOT
from quire.flags import cluster_flags
from quire.flags.parser import CommandParser
from quire.flags.setting_flags import human_int
from quire.params import SamplingParams
from quire.shared.errors import Unavailable

NUMBERS = re.compile(r"\d[\d.,x]*")
CLUSTER_FLAGS = ("workers", "prefill_workers", "decode_workers", "frontends", "schedulers", "redis")
END_TIMEOUT_S = 60.0


@dataclass(slots=True)
class StartTimes:
    """Times of one start, in seconds since the command was run."""

    ready_s: float = 0.0
    first_token_s: float = 0.0
    events: list[tuple[str, str, float]] = field(default_factory=list)  # (service, message, when)


def configure(parser: CommandParser) -> None:
    """Adds the cluster's flags and the numbers of cold and warm starts."""
    cluster_flags.configure(parser)
    parser.set_defaults(model=shapes.TINY)
    parser.epilog = shapes.EPILOG
    parser.add_argument("--runs", type=human_int, default=3, help="starts with a warm page cache; medians are shown")
    parser.add_argument(
        "--cold", type=human_int, default=1, help="starts after the files were dropped from the page cache"
    )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Starts each model's cluster cold and warm several times and yields rows of the medians."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.model.split(","):
            shape = shapes.prepare(name, Path(scratch))
            command = command_of(arguments, shape)
            files = [shape.folder or bundled.FOLDER, Path(sys.prefix), ROOT]
            for cache, count in (("cold", arguments.cold), ("warm", arguments.runs)):
                starts = [_start(command, cache, files, f"{shape.name} {cache} {i + 1}") for i in range(count)]
                yield from rows_of({"shape": shape.name, "cache": cache}, starts)


def command_of(arguments: argparse.Namespace, shape: shapes.BenchShape) -> list[str]:
    """Returns the `quire up` command with the given flags."""
    flags: dict[str, Any] = {name: getattr(arguments, name) for name in CLUSTER_FLAGS}
    if flags["workers"] is None:
        del flags["workers"]  # the number of workers without a role
    flags |= {"http_port": 0, "grpc_port": 0, "log_format": "json"}
    if shape.random_weights:
        flags["load_format"] = "dummy"
    given = vars(arguments)
    settings = [(f"{service}.{name}", name) for service, name in cluster_flags.settings_by_flag()]
    flags |= {name: given[dest] for dest, name in settings if dest in given}
    model = [str(shape.folder)] if shape.folder else []
    return [*ServiceSpec("up", "", flags).command(), *model]


def rows_of(about: Row, starts: Sequence[StartTimes]) -> Iterator[Row]:
    """Yields medians: the totals, then the logged events by the services' clocks."""
    if not starts:
        return
    ready = statistics.median(start.ready_s for start in starts)
    first_token = statistics.median(start.first_token_s for start in starts)
    yield {**about, "ready_s": ready, "first_token_s": first_token, "runs": len(starts)}
    for service, message in dict.fromkeys(event[:2] for event in starts[0].events):
        times = [at for start in starts for name, text, at in start.events if (name, text) == (service, message)]
        yield {**about, "service": service, "event": message, "at_s": statistics.median(times)}


def _start(command: list[str], cache: str, files: Sequence[Path], title: str) -> StartTimes:
    """Runs `quire up` until its first token, ends it, and returns the times since the start in seconds with the
    events until then. A cold start first drops the files from the page cache."""
    if cache == "cold":
        page_cache.forget(files)
    start, begin, begin_unix = StartTimes(), time.monotonic(), time.time()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        listener = threading.Thread(target=_listen, args=(process, start, begin_unix), daemon=True)
        listener.start()
        try:
            address = _await_ready(process)
            start.ready_s = time.monotonic() - begin
            _take_one_token(address)
            start.first_token_s = time.monotonic() - begin
        finally:
            _end(process)
            listener.join()
    progress(f"{title}: ready after {start.ready_s:.2f} s, first token after {start.first_token_s:.2f} s")
    start.events = [event for event in start.events if event[2] <= start.first_token_s]
    return start


def _take_one_token(address: str) -> None:
    with Client(address) as client:
        client.generate(list(range(3, 11)), SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))


def _await_ready(process: subprocess.Popen[str]) -> str:
    """Reads the command's output until its ready line and returns the gRPC address; raises Unavailable if it ends
    before."""
    assert process.stdout is not None
    for line in process.stdout:  # all lines are JSON, because of the flags
        ready = json.loads(line)
        if ready["message"] == "ready":
            return str(ready["grpc"])
    raise Unavailable(f"quire up ended with status {process.wait()} before it was ready")


def _listen(process: subprocess.Popen[str], start: StartTimes, begin_unix: float) -> None:
    """Reads the process's stderr: JSON log lines become events with their time since the start, other lines are
    shown. Numbers in messages become #."""
    assert process.stderr is not None
    for line in process.stderr:
        try:
            entry = json.loads(line)
            start.events.append((entry["service"], NUMBERS.sub("#", entry["message"]), entry["time"] - begin_unix))
        except (ValueError, KeyError, TypeError):
            progress(line.rstrip())


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process with SIGTERM, or SIGKILL after END_TIMEOUT_S."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
