"""Where a command finds the cluster."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

from quire.cli.flags import human_int
from quire.client import Client
from shared.errors import Unavailable

ADDRESS_VARIABLE = "QUIRE_ADDRESS"
NOT_CONNECTED = "failed to connect to all addresses"  # gRPC's words


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="", metavar="HOST:PORT", help=f"a frontend's gRPC (or {ADDRESS_VARIABLE})")
    parser.add_argument("--grpc-port", type=human_int, default=50051, metavar="PORT", help="the same, on this machine")


def address_of(arguments: argparse.Namespace) -> str:
    return arguments.address or os.environ.get(ADDRESS_VARIABLE, "") or f"127.0.0.1:{arguments.grpc_port}"


@contextlib.contextmanager
def client_of(arguments: argparse.Namespace) -> Iterator[Client]:
    """Where nothing answers, the error says so and what to do, in place of gRPC's words."""
    address = address_of(arguments)
    with Client(address) as client:
        try:
            yield client
        except Unavailable as error:
            if NOT_CONNECTED not in error.message:
                raise
            reason = error.message.rsplit(": ", 1)[-1]
            message = f"no cluster answers at {address} ({reason}); `quire up` starts one, --address names another"
            raise Unavailable(message) from None
