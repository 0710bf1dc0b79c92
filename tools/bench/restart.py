"""`python -m tools.bench restart`: kills a worker (kill -9) while prompts recur, and measures the recovery.

The same cluster without persistent KV, with host memory in a region, and with a disk: time of the first recurring
prompt, including the worker's start, and of the others.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.bench import target
from quire.bench.report import Row, progress
from quire.bench.target import Target
from quire.bench.workload import shapes, workloads
from quire.bench.workload.workloads import Workload
from quire.client import Client
from quire.flags.parser import CommandParser
from quire.flags.setting_flags import human_int
from quire.params import SamplingParams
from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2

FLAG = "worker.{}"  # name of a worker's setting in the arguments
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
PATIENCE_S = 600.0


def configure(parser: CommandParser) -> None:
    """Adds the target's flags, the workload, and the folder for the persistent region."""
    target.configure(parser)
    parser.set_defaults(**{FLAG.format("kv_offloading_size"): 2.0, FLAG.format("kv_offloading_disk_size"): 4.0})
    parser.add_argument(
        "--work",
        default="cpu_returning",
        help="workload whose prompts are sent again after the restart (default: cpu_returning)",
    )
    parser.add_argument("--count", type=human_int, default=8, help="number of its prompts")
    parser.add_argument("--region", default="/dev/shm", metavar="FOLDER", help="folder in a tmpfs for the region")
    parser.add_argument(
        "--settle-s",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="time without new stored blocks before the worker is killed (default: 1)",
    )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per model and kind of persistence; raises InvalidArgument for a cluster that it did not start."""
    if arguments.address or arguments.base_url:
        raise InvalidArgument(
            "address: this benchmark kills a worker, so it measures only a cluster that it starts; leave the flag out",
            field="address",
        )
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.model.split(","):
            shape = shapes.prepare(name, Path(scratch))
            for kept in ("nothing", "region", "disk"):
                with tempfile.TemporaryDirectory(dir=arguments.region if kept == "region" else None) as folder:
                    yield {"shape": shape.name, "kept": kept, **_restart(arguments, shape, kept, folder)}


def _restart(arguments: argparse.Namespace, shape: shapes.BenchShape, kept: str, folder: str) -> Row:
    """Starts a cluster that keeps KV in `kept`, asks the prompts, kills the worker, and asks again. Returns times to
    first token in seconds and the cached share of the prompts."""
    own = argparse.Namespace(**vars(arguments))
    below: dict[str, dict[str, object]] = {
        "nothing": {"kv_offloading_size": 0.0, "kv_offloading_disk_size": 0.0},
        "region": {"kv_offloading_region": folder, "kv_offloading_disk_size": 0.0},
        "disk": {"kv_offloading_disk": folder},
    }
    for name, value in below[kept].items():
        setattr(own, FLAG.format(name), value)
    [made] = workloads.named(arguments.work)
    with target.started_cluster(own, shape) as served, Client(served.grpc_address) as client:
        work = made.first(arguments.count).within(served.vocab_size)
        first, _ = _ask(client, work)
        _settle(client, arguments.settle_s)
        _kill_worker(client, served)
        begun = time.perf_counter()
        again, cached = _ask(client, work)
        progress(f"{shape.name} {kept}: {time.perf_counter() - begun:.2f} s for all of them after the kill")
    return {
        "num_prompt_tokens": work.num_prompt_tokens,
        "new_ttft_s": statistics.median(first[1:]),
        "after_kill_s": again[0],
        "ttft_s": statistics.median(again[1:]),
        "cached_share": cached / work.num_prompt_tokens,
    }


def _ask(client: Client, work: Workload) -> tuple[list[float], int]:
    """Returns the seconds until each prompt, one after the other, has its token, and the cached tokens."""
    took, cached = [], 0
    for item in work.items:
        begun = time.perf_counter()
        [result] = client.generate([list(item.prompt)], ONE, timeout_s=PATIENCE_S)
        took.append(time.perf_counter() - begun)
        cached += result.cached_tokens
    return took, cached


def _settle(client: Client, seconds: float) -> None:
    """Waits until the amounts stored in host memory and on disk have not changed for some seconds."""
    before = None
    while before != (now := _stored(client)):
        before = now
        time.sleep(seconds)


def _stored(client: Client) -> tuple[int, int]:
    worker = _worker(client)
    return worker.host_memory.stored, worker.disk.stored


def _worker(client: Client) -> admin_pb2.ServiceStatus:
    return next(service for service in client.status() if service.role == admin_pb2.ROLE_WORKER)


def _kill_worker(client: Client, served: Target) -> None:
    """Kills the cluster's worker with SIGKILL and waits until the scheduler has detached it."""
    number = _worker(client).pid
    assert number in served.pids.values(), "it is ours"
    os.kill(number, signal.SIGKILL)
    _until(lambda: not _is_attached(client, number))


def _is_attached(client: Client, number: int) -> bool:
    return any(service.pid == number for service in client.status() if service.role == admin_pb2.ROLE_WORKER)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)
