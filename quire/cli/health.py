"""`quire health`: health check for images and operators."""

from __future__ import annotations

import argparse

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.cli.connection import add_address, address_of, tls_of
from quire.shared.rpc.channel import connect_blocking
from quire.shared.rpc.server import LIVENESS


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the address, the service to check, and the timeout."""
    add_address(parser)
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help=f"name of a gRPC service, or {LIVENESS!r}; default: the whole server",
    )
    parser.add_argument("--timeout-s", type=float, default=5.0, metavar="S", help="maximum time to wait, seconds")


def run(arguments: argparse.Namespace) -> int:
    """Asks gRPC's health service once and prints the status; returns 0 only for SERVING."""
    with connect_blocking(address_of(arguments), tls_of(arguments)) as channel:
        request = health_pb2.HealthCheckRequest(service=arguments.service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=arguments.timeout_s)
        except grpc.RpcError as error:
            print(error.code().name)
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
