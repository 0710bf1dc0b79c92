"""Checks a running cluster: whether it answers, and whether all services have the same version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.client import Client
from quire.clients.admin import admin_of
from quire.doctor.finding import Finding, error, ok, warning
from quire.shared.errors import QuireError
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.rpc.channel import connect_blocking
from quire.shared.security.tls_files import Tls
from quire.shared.version import VERSION

PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Address and credentials of a cluster; `is_named` says that the user gave it, otherwise it is the default of
    `quire up`."""

    address: str
    tls: Tls
    admin_address: str = ""
    admin_key_file: str = ""
    is_named: bool = False


def find(at: ClusterAddress) -> list[pb.ServiceStatus]:
    """Returns the cluster's services, the frontend first; empty if there is no cluster, or none that this user may
    query."""
    try:
        admin_of(at.address, at.admin_address, at.admin_key_file)
        admin = {"admin_address": at.admin_address, "admin_key_file": at.admin_key_file}
        with Client(at.address, tls=at.tls, **admin) as client:
            return client.status()
    except QuireError:
        return []


def check(at: ClusterAddress, services: Sequence[pb.ServiceStatus]) -> Iterator[Finding]:
    """Yields findings about the services of a running cluster; a missing one is an error only if its address was
    named."""
    if not services:
        yield _unseen(at) if at.is_named else ok("cluster", f"no cluster of this user answers at {at.address}")
        return
    yield ok("cluster", f"{len(services)} services at {at.address}")
    for service in services:
        if service.state in (pb.STATE_DOWN, pb.STATE_STALLED):
            state = pb.State.Name(service.state).removeprefix("STATE_").lower()
            yield error(service.id, f"is {state}", "find it with `quire status`, then read the log of that process")
    yield _versions(services)


def _unseen(at: ClusterAddress) -> Finding:
    """Distinguishes a frontend that does not answer from one that answers but shows its services only to its
    operator."""
    try:
        with connect_blocking(at.address, at.tls) as channel:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    except QuireError as refusal:
        return error("cluster", refusal.message, "check --address and --tls")
    except grpc.RpcError as refusal:
        found = f"nothing answers at {at.address} ({refusal.code().name})"
        return error("cluster", found, "check --address (a frontend's gRPC port), --tls and its log")
    advice = "run this on its machine as its user, or with --admin-address and --admin-key-file"
    return warning("cluster", f"answers at {at.address}, but lists its services only for its operator", advice)


def _versions(services: Sequence[pb.ServiceStatus]) -> Finding:
    """Compares the services' versions with this command's; a difference is a warning."""
    by_version: dict[str, list[str]] = {VERSION: ["this command"]}
    for service in services:
        if service.version:
            by_version.setdefault(service.version, []).append(service.id)
    if len(by_version) == 1:
        return ok("versions", f"{VERSION} everywhere")
    found = "; ".join(f"{version}: {', '.join(names)}" for version, names in by_version.items())
    return warning("versions", found, "finish the upgrade: only services of neighbouring versions are compatible")
