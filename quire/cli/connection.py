"""Where a command finds the cluster, and what it shows there."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

from quire.cli.flags import human_int, mapping
from quire.client import Client
from shared.errors import Unavailable
from shared.settings import Tls
from shared.settings.base import build

ADDRESS_VARIABLE = "QUIRE_ADDRESS"
TLS_VARIABLE = "QUIRE_TLS"
ADMIN_ADDRESS_VARIABLE = "QUIRE_ADMIN_ADDRESS"
ADMIN_KEY_VARIABLE = "QUIRE_ADMIN_KEY_FILE"
NOT_CONNECTED = "failed to connect to all addresses"  # gRPC's words


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="", metavar="HOST:PORT", help=f"a frontend's gRPC (or {ADDRESS_VARIABLE})")
    parser.add_argument("--grpc-port", type=human_int, default=50051, metavar="PORT", help="the same, on this machine")
    parser.add_argument(
        "--tls",
        default="",
        metavar="NAME=VALUE,...",
        help=f"ca=FILE, cert=FILE and key=FILE of ours (or {TLS_VARIABLE})",
    )


def add_admin(parser: argparse.ArgumentParser) -> None:
    """For commands that ask the admin service."""
    add_address(parser)
    parser.add_argument(
        "--admin-address",
        default="",
        metavar="HOST:PORT",
        help=f"of a frontend on another machine, or of another user (or {ADMIN_ADDRESS_VARIABLE})",
    )
    parser.add_argument(
        "--admin-key-file", default="", metavar="FILE", help=f"the key to show there (or {ADMIN_KEY_VARIABLE})"
    )


def address_of(arguments: argparse.Namespace) -> str:
    return arguments.address or os.environ.get(ADDRESS_VARIABLE, "") or f"127.0.0.1:{arguments.grpc_port}"


def tls_of(arguments: argparse.Namespace) -> Tls:
    """Raises InvalidArgument for what is no setting of TLS."""
    text = arguments.tls or os.environ.get(TLS_VARIABLE, "")
    return build(Tls, mapping(text), "tls")


@contextlib.contextmanager
def client_of(arguments: argparse.Namespace) -> Iterator[Client]:
    """Where nothing answers, the error says so and what to do, in place of gRPC's words."""
    address = address_of(arguments)
    client = Client(
        address,
        tls=tls_of(arguments),
        admin_address=getattr(arguments, "admin_address", "") or os.environ.get(ADMIN_ADDRESS_VARIABLE, ""),
        admin_key_file=getattr(arguments, "admin_key_file", "") or os.environ.get(ADMIN_KEY_VARIABLE, ""),
    )
    with client:
        try:
            yield client
        except Unavailable as error:
            if NOT_CONNECTED not in error.message:
                raise
            reason = error.message.rsplit(": ", 1)[-1]
            message = f"no cluster answers at {address} ({reason}); `quire up` starts one, --address names another"
            raise Unavailable(message) from None
