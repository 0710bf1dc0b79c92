"""Targets of a measurement: a cluster started for it, a running one, or any server with an OpenAI API."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from quire.bench.load_client import http_calls
from quire.bench.workload import adapters, shapes
from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from quire.flags import cluster_flags
from quire.flags.groups import GROUPS
from quire.flags.parser import CommandParser
from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.settings import SERVICES

QUIET = "warning"


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses for requests, and the processes to observe."""

    name: str
    vocab_size: int
    grpc_address: str = ""  # empty: it does not offer Quire's gRPC API
    http_address: str = ""  # HOST:PORT or URL; empty: unknown
    frontends: int = 1
    pids: dict[str, int] = field(default_factory=dict)  # services on this machine, by id
    metrics: dict[str, str] = field(default_factory=dict)  # HOST:PORT of the services' metrics, by id
    adapters: tuple[str, ...] = ()  # assigned to requests in turn

    def reset_prefix_cache(self) -> None:
        """Empties the target's prefix cache, over gRPC or, for other servers, over HTTP."""
        if self.grpc_address:
            with Client(self.grpc_address) as client:
                client.reset_prefix_cache()
        else:
            http_calls.reset_prefix_cache(self.http_address)


def configure(parser: CommandParser) -> None:
    """Adds the flags of `quire up`, and flags for servers that already run."""
    cluster_flags.add(parser)
    parser.group_flags(GROUPS)
    parser.set_defaults(model=shapes.TINY, http_port=0, grpc_port=0)
    parser.epilog = shapes.EPILOG
    there = parser.add_argument_group("instead of starting a cluster")
    there.add_argument("--address", default="", metavar="HOST:PORT", help="gRPC address of a running cluster")
    there.add_argument("--http", default="", metavar="HOST:PORT", help="HTTP address of the same cluster")
    there.add_argument(
        "--base-url", default="", metavar="URL", help="any server with an OpenAI API; MODEL names its shape"
    )


def targets(arguments: argparse.Namespace, scratch: Path) -> Generator[Target]:
    """Yields the servers to measure: the running cluster of --address, or one target per model of --model, either the
    server of --base-url or a cluster started here, which is stopped when the next target is requested. Raises
    InvalidArgument if adapters are requested for a server that already runs."""
    num_adapters = getattr(arguments, "lora_adapters", 0)  # only modes that send requests with adapters have the flag
    if num_adapters and (arguments.address or arguments.base_url):
        text = f"lora_adapters: {num_adapters}: adapters are written only for a cluster that this command starts"
        raise InvalidArgument(text, field="lora_adapters")
    if arguments.address:
        yield running_cluster(arguments.address, arguments.http)
        return
    for name in arguments.model.split(","):
        shape = shapes.prepare(name, scratch)
        if arguments.base_url:
            yield Target(shape.name, shape.vocab_size, http_address=arguments.base_url)
            continue
        made = adapters.make(shape, scratch, num_adapters, arguments.lora_rank) if num_adapters else {}
        with started_cluster(arguments, shape, made) as target:
            yield target


def named(text: str, what: str) -> tuple[str, str]:
    """Parses `NAME=WHAT` to a pair; raises InvalidArgument if a half is missing."""
    name, _, rest = text.partition("=")
    if not (name and rest):
        raise InvalidArgument(f"beside: {text!r} must have the form NAME={what}", field="beside")
    return name, rest


def other(text: str, served: Target) -> Target:
    """Parses `NAME=URL`: another server with the same model as `served`."""
    name, url = named(text, "URL")
    return Target(name, served.vocab_size, http_address=url)


def cluster_options(
    arguments: argparse.Namespace, shape: shapes.BenchShape, lora: Mapping[str, str] | None = None
) -> ClusterOptions:
    """Returns options as of `quire up`, but without output. `lora`: adapter folders by name, in addition to those of
    the command."""
    options = cluster_flags.options(arguments)
    settings = {service: {"log_level": QUIET, **options.settings.get(service, {})} for service in SERVICES}
    if shape.random_weights:
        settings["worker"].setdefault("load_format", "dummy")
    if lora:
        settings["worker"]["lora"] = {**settings["worker"].get("lora", {}), **lora}
    return dataclasses.replace(options, model=str(shape.folder or ""), settings=settings)


@contextmanager
def started_cluster(
    arguments: argparse.Namespace, shape: shapes.BenchShape, lora: Mapping[str, str] | None = None
) -> Iterator[Target]:
    """Starts a cluster for the shape, yields it as a target with process ids and metrics pages, and stops it
    afterwards."""
    with Cluster(cluster_options(arguments, shape, lora)) as cluster:
        pages = {process.spec.id: _page(process.addresses) for process in cluster.processes}
        yield Target(
            shape.name,
            shape.vocab_size,
            cluster.grpc_address,
            cluster.http_address,
            arguments.frontends,
            {process.spec.id: process.pid for process in cluster.processes if process.pid},
            {service: address for service, address in pages.items() if address},
            tuple(lora or ()),
        )


def _page(addresses: Mapping[str, str]) -> str:
    """Returns the address of a service's metrics; empty if it has none."""
    return addresses.get("metrics") or addresses.get("http", "")


def running_cluster(grpc_address: str, http_address: str) -> Target:
    """Describes a cluster that runs already; CPU times are only measured for processes of this machine."""
    with Client(grpc_address) as client:
        model, services = client.models()[0], client.status()
    frontends = [service for service in services if service.role == admin_pb2.ROLE_FRONTEND]
    pids = {service.id: service.pid for service in services if _is_here(service.pid)}
    pages = {frontends[0].id: http_address} if http_address and frontends else {}
    return Target(model.name, model.vocab_size, grpc_address, http_address, len(frontends) or 1, pids, pages)


def _is_here(pid: int) -> bool:
    """Whether a process id belongs to a Quire process on this machine."""
    try:
        return b"quire" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
