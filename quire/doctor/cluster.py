"""A cluster that is up already: whether it answers, and whether all of it is of one version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.admin import admin_of
from quire.client import Client
from quire.doctor.finding import Finding, error, ok, warning
from shared.errors import QuireError
from shared.pb.admin.v1 import admin_pb2 as pb
from shared.settings.tls import Tls
from shared.version import VERSION


def find(address: str, tls: Tls) -> list[pb.ServiceStatus]:
    """Its services, the frontend first; empty if there is none, or none that lets this user ask."""
    try:
        admin_of(address, "", "")
        with Client(address, tls=tls) as client:
            return client.status()
    except QuireError:
        return []


def look(address: str, services: Sequence[pb.ServiceStatus]) -> Iterator[Finding]:
    if not services:
        yield ok("cluster", f"none of this user's answers at {address}")
        return
    yield ok("cluster", f"{len(services)} services at {address}")
    for service in services:
        if service.state in (pb.STATE_DOWN, pb.STATE_STALLED):
            state = pb.State.Name(service.state).removeprefix("STATE_").lower()
            yield error(service.id, f"is {state}", "its log says why: quire status, then the log of that process")
    yield _versions(services)


def _versions(services: Sequence[pb.ServiceStatus]) -> Finding:
    by_version: dict[str, list[str]] = {VERSION: ["this command"]}
    for service in services:
        if service.version:
            by_version.setdefault(service.version, []).append(service.id)
    if len(by_version) == 1:
        return ok("versions", f"{VERSION} everywhere")
    found = "; ".join(f"{version}: {', '.join(names)}" for version, names in by_version.items())
    return warning("versions", found, "finish the update: services of neighbouring versions talk, others may not")
