"""Where a command finds the cluster."""

from __future__ import annotations

import argparse
import os

from quire.cli.flags import human_int
from quire.client import Client

ADDRESS_VARIABLE = "QUIRE_ADDRESS"


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="", metavar="HOST:PORT", help=f"a frontend's gRPC (or {ADDRESS_VARIABLE})")
    parser.add_argument("--grpc-port", type=human_int, default=50051, metavar="PORT", help="the same, on this machine")


def address_of(arguments: argparse.Namespace) -> str:
    return arguments.address or os.environ.get(ADDRESS_VARIABLE, "") or f"127.0.0.1:{arguments.grpc_port}"


def client_of(arguments: argparse.Namespace) -> Client:
    return Client(address_of(arguments))
