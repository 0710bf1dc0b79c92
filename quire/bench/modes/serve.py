"""`quire bench serve`: streams over gRPC and over the OpenAI API, of Quire or any other server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

from quire.bench import load, target
from quire.bench.load_client.clients import RequestSender
from quire.bench.load_client.timing import LoadResult
from quire.bench.report import Row
from quire.bench.target import Target
from quire.bench.workload import adapters, images
from quire.bench.workload.images import NO_IMAGES, ImageOptions
from quire.bench.workload.workloads import Workload
from quire.flags.parser import CommandParser
from quire.shared.errors import InvalidArgument

PROTOCOLS = ("grpc", "http")


def configure(parser: CommandParser) -> None:
    """Adds the flags of target, adapters, load and protocol, and of other servers to compare with."""
    target.configure(parser)
    adapters.configure(parser)
    load.configure(parser, work="mixed", reset=False)
    add_protocol(parser)
    images.configure(parser)
    parser.add_argument(
        "--load",
        default="",
        metavar="A,B,...",
        help="burst (all at once), N (in flight), N/s (Poisson arrivals); default: the workload's own",
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="another server with an OpenAI API and the same model: runs take turns, over HTTP",
    )


def add_protocol(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--protocol", default="", metavar="A,B", help="grpc, http (default: all that the server has)")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures every combination of target, arrival pattern and protocol, alternating with the other servers, and
    yields rows with ratios."""
    effort, pictures = load.load_options(arguments), images.image_options(arguments)
    for served, work in load.served(arguments, effort):
        others = [target.other(text, served) for text in arguments.beside]
        for arrival in (arguments.load or work.load).split(","):
            for protocol in protocols(arguments.protocol or ("http" if others or pictures.count else ""), served):
                targets = [served, *others]
                sides = [load.side_of_clients(each, streaming(protocol, each, work, pictures)) for each in targets]
                about = {"shape": served.name, "work": work.name, "protocol": protocol, "load": arrival}
                if pictures.count:
                    about["images"] = f"{pictures.count}x{pictures.width}x{pictures.height}"
                measured = load.measure(sides, work, arrival=arrival, effort=effort, read=_read)
                yield from load.comparison_rows([each.name for each in targets], about, measured)


def protocols(wanted: str, served: Target) -> list[str]:
    """Returns the requested protocols, or all that the target supports; raises InvalidArgument for one whose address
    is unknown."""
    has = {"grpc": served.grpc_address, "http": served.http_address}
    names = wanted.split(",") if wanted else [name for name in PROTOCOLS if has[name]]
    for name in names:
        if not has.get(name):
            raise InvalidArgument(
                f"protocol: {name!r} cannot be used: {served.name} has {', '.join(key for key in has if has[key])}",
                field="protocol",
            )
    return names


def streaming(
    protocol: str, served: Target, work: Workload, pictures: ImageOptions = NO_IMAGES
) -> Callable[[], RequestSender]:
    """Returns a factory of load clients. Raises InvalidArgument for pictures over gRPC."""
    if protocol == "http":
        return load.http_caller(served, work, pictures)
    if pictures.count:
        raise InvalidArgument("protocol: pictures are sent over HTTP; use --protocol http", field="protocol")
    return load.grpc_caller(served, work, final_only=False)


def _read(outcome: LoadResult) -> dict[str, float]:
    return outcome.rates() | outcome.latencies()
