"""Connections to schedulers: configured ones are kept for ever, discovered ones while the registry lists them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.services.frontend.scheduler_client.connection import Connection
from quire.shared.errors import FailedPrecondition
from quire.shared.logs import logger
from quire.shared.prefix_index import SchedulerEntry
from quire.shared.process.supervision import Tasks, run_restarting

log = logger("scheduler_client")


@dataclass(frozen=True, slots=True)
class ConnectedScheduler:
    """A scheduler with a connection. `entry`: its registry entry; None for a configured one."""

    connection: Connection
    entry: SchedulerEntry | None
    task: asyncio.Task[None]


class SchedulerConnections:
    """Owns the connections, one per scheduler even if it has several addresses."""

    def __init__(
        self, configured: Iterable[str], connection_to: Callable[[str, bool], Connection], forget_after_s: float
    ) -> None:
        """Starts without connections. `forget_after_s`: of a discovered scheduler that has left the registry."""
        self._forget_after_s = forget_after_s
        self._configured = tuple(dict.fromkeys(configured))
        self._connection_to = connection_to
        self._members: dict[str, ConnectedScheduler] = {}
        self._misfits: dict[str, int] = {}  # address -> epoch of listed schedulers that serve another model
        self._tasks = Tasks()
        self._failed = asyncio.get_running_loop().create_future()

    @property
    def addresses(self) -> list[str]:
        """One address of each connected or configured scheduler."""
        return [address for address, member in self._members.items() if member.connection.duplicate_of is None]

    def reconnect_attempts(self) -> dict[str, object]:
        """Returns the number of attempts per disconnected address; the liveness check requires progress."""
        return {
            f"connection to {address}": member.connection.num_attempts
            for address, member in self._members.items()
            if member.connection.is_disconnected
        }

    @property
    def newest_update(self) -> int:
        """Highest weights update that the connected schedulers report; 0 if there was none."""
        sessions = (member.connection.session for member in self._members.values())
        return max((session.view.weights.update for session in sessions if session is not None), default=0)

    def is_configured(self, address: str) -> bool:
        """Whether the settings name the address."""
        return address in self._configured

    async def run(self) -> None:
        """Runs all connections until cancelled. Raises FailedPrecondition if a configured scheduler serves another
        model."""
        for address in self._configured:
            self._add(address, None)
        try:
            await self._failed
        finally:
            await self._tasks.close()

    def update(self, entries: Seq[SchedulerEntry]) -> None:
        """Connects to newly registered schedulers. Drops one that has left the registry after some seconds without a
        session; configured ones stay."""
        listed = {entry.address: entry for entry in entries}
        self._misfits = {a: e for a, e in self._misfits.items() if a in listed and listed[a].epoch == e}
        for address, entry in listed.items():
            if self._is_new(entry):
                log.info("scheduler discovered", scheduler=entry.id, address=address)
                self._add(address, entry)
        for address, member in list(self._members.items()):
            if member.entry and address not in listed and member.connection.outage_s > self._forget_after_s:
                log.info("scheduler removed", scheduler=member.entry.id, address=address)
                self._members.pop(address).task.cancel()

    def _is_new(self, entry: SchedulerEntry) -> bool:
        """Whether the entry has no connection yet and no session through another address."""
        if any(entry.address in known for known in (self._configured, self._members, self._misfits)):
            return False
        sessions = (member.connection.session for member in self._members.values())
        return not any(s is not None and (s.scheduler_id, s.epoch) == (entry.id, entry.epoch) for s in sessions)

    def _add(self, address: str, entry: SchedulerEntry | None) -> None:
        """Starts a connection to the address; one without a registry entry counts as configured."""
        connection = self._connection_to(address, entry is None)
        task = self._tasks.start(f"connection to {address}", self._run(connection, entry))
        self._members[address] = ConnectedScheduler(connection, entry, task)

    async def _run(self, connection: Connection, entry: SchedulerEntry | None) -> None:
        """Runs a connection. A discovered scheduler with another model is ignored until it restarts; any other failure
        ends run()."""
        try:
            await run_restarting(f"the connection to scheduler {connection.address}", connection.run)
        except FailedPrecondition as error:
            if entry is None:
                self._fail(error)
                return
            log.warning("ignoring a discovered scheduler that serves another model", reason=error.message)
            self._misfits[connection.address] = entry.epoch
            del self._members[connection.address]
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends run() with this error; only the first one counts."""
        if not self._failed.done():
            self._failed.set_exception(error)
