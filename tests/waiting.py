"""What tests wait for: states that are reached soon, as opposed to those that something has just been told of."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.client import Client
from quire.shared.pb.admin.v1 import admin_pb2

PATIENCE_S = 60.0


def until(holds: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    ends_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < ends_s, f"not within {patience_s:g} s"
        time.sleep(0.02)


def services(client: Client, *names: str) -> dict[str, admin_pb2.ServiceStatus]:
    """All that there are, by id, once these are among them: one whose session a standstill has ended is back soon."""
    found: dict[str, admin_pb2.ServiceStatus] = {}

    def are_there() -> bool:
        found.clear()
        found.update((service.id, service) for service in client.status())
        return found.keys() >= set(names)

    until(are_there)
    return found


def worker_of(client: Client) -> admin_pb2.ServiceStatus:
    """The only one, or the first."""
    found: list[admin_pb2.ServiceStatus] = []

    def is_there() -> bool:
        found[:] = [service for service in client.status() if service.role == admin_pb2.ROLE_WORKER]
        return bool(found)

    until(is_there)
    return found[0]


def until_idle(client: Client) -> None:
    """No worker runs or keeps anything: an answer is read before the last step of its sequence has returned, and a
    client that has left is heard of a moment later."""

    def is_idle() -> bool:
        found = [service for service in client.status() if service.role == admin_pb2.ROLE_WORKER]
        return bool(found) and not any(one.blocks.used or one.running or one.waiting for one in found)

    until(is_idle)


def until_nothing_moves(client: Client) -> admin_pb2.ServiceStatus:
    """The only worker, once no block is on its way between its tiers: a pause waits for those that are, and whatever
    waits for room then is ordered before the next one."""
    seen: list[admin_pb2.ServiceStatus] = []

    def has_settled() -> bool:
        client.pause_generation()
        try:
            seen.append(worker_of(client))
        finally:
            client.resume_generation()
        return len(seen) > 1 and _tiers(seen[-1]) == _tiers(seen[-2])

    until(has_settled)
    return seen[-1]


def _tiers(worker: admin_pb2.ServiceStatus) -> tuple[admin_pb2.HostMemory, admin_pb2.DiskBlocks]:
    return worker.host_memory, worker.disk
