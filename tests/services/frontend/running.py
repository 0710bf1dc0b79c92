"""Frontend in the test's event loop, reached over real gRPC and HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from prometheus_client.parser import text_string_to_metric_families

from quire.services.frontend.composition.timing import DEFAULT_TIMING, FrontendTiming
from quire.services.frontend.main import Frontend
from quire.services.frontend.scheduler_client.sequence import Sequence
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.process.lifecycle import Shutdown
from quire.shared.rpc.admin_credentials import AdminCredentials
from quire.shared.settings import FrontendSettings
from tests.admin import Admin, calling
from tests.services.frontend.scripted_scheduler import ScriptedScheduler
from tests.waiting import eventually

# For clients of plain HTTP: creating a default context reads all certificates of this machine each time.
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass
class Running:
    """Running frontend, with clients for its interfaces."""

    frontend: Frontend
    shutdown: Shutdown
    task: asyncio.Task[None]
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    admin: Admin
    name: str

    @property
    def url(self) -> str:
        return f"http://{self.frontend.http_address}"

    @property
    def inference(self) -> inference_pb2_grpc.InferenceServiceStub:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    @property
    def num_usable_sessions(self) -> int:
        """Number of sessions whose schedulers accept requests; the scheduler's first message has arrived."""
        return len(self.frontend.core.client.usable_sessions)

    async def until_sessions(self, count: int) -> None:
        await eventually(lambda: self.num_usable_sessions == count)

    async def until_view(self, holds: Callable[[pb.ClusterView], bool]) -> None:
        """Waits until `holds` is true for the latest view of every scheduler."""
        await eventually(lambda: all(holds(session.view) for session in self.frontend.core.client.sessions))

    async def until_open(self, is_open: bool) -> None:
        """Waits until there is a session, or none."""
        await eventually(lambda: self.frontend.core.client.is_open == is_open)

    async def until_idle(self, **shown: str) -> None:
        """Waits until no call is admitted: clients read an answer just before its slot is released.

        `shown`: headers.
        """
        await eventually(
            lambda: self.http.get("/load", headers=shown), lambda found: found.json() == {"server_load": 0}
        )

    @property
    def live(self) -> list[Sequence]:
        """Sequences of all sessions."""
        return [sequence for session in self.frontend.core.client.sessions for sequence in session.live.values()]

    def has_caught_up(self, script: ScriptedScheduler) -> bool:
        """Returns whether every token that the script has sent has arrived."""
        live = {
            (session.epoch, sequence_id): len(sequence.tokens)
            for session in self.frontend.core.client.sessions
            for sequence_id, sequence in session.live.items()
        }
        return all(
            live.get((script.epoch, sequence.id), sequence.num_outputs) == sequence.num_outputs
            for session in script.sessions
            if session.hello.frontend_id == self.name
            for sequence in session.running.values()
        )

    async def until_caught_up(self, script: ScriptedScheduler) -> None:
        """Waits until every token has arrived; the script must be paused by then."""
        await eventually(lambda: self.has_caught_up(script))

    def write_each_token(self, script: ScriptedScheduler) -> None:
        """Makes the script wait with new tokens until the last ones have been read for their client, so that none are
        merged, however long this process is blocked."""
        script.is_heard = lambda: self.has_caught_up(script) and not self.has_unread_output

    @property
    def has_unread_output(self) -> bool:
        """Whether any sample has output that was not read yet."""
        return any(getattr(sequence.sink, "_is_posted", False) for sequence in self.live)

    async def metrics(self) -> dict[str, float]:
        """Returns the metrics by sample name and labels (except model and engine)."""
        page = (await self.http.get("/metrics")).text
        found = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                suffix = "{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}" if labels else ""
                found[sample.name + suffix] = sample.value
        return found


@asynccontextmanager
async def running(
    folder: Path,
    *schedulers: str,
    until_health: Collection[int] = (200,),
    timing: FrontendTiming = DEFAULT_TIMING,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Runs a frontend; `until_health`: statuses of /health to wait for; none: do not wait."""
    values = {
        "model": str(folder),
        "grpc_port": 0,
        "http_port": 0,
        "schedulers": schedulers,
        "unavailable_after_s": 60.0,
        "drain_timeout_s": 5.0,
        **settings,
    }
    shutdown, asked = Shutdown(), FrontendSettings(**values)
    frontend = Frontend(asked, shutdown, timing)
    task = asyncio.create_task(_serve(frontend))
    try:
        async with (
            httpx.AsyncClient(base_url=f"http://{frontend.http_address}", timeout=60, verify=NO_TLS) as http,
            grpc.aio.insecure_channel(frontend.grpc_address) as channel,
            calling(AdminCredentials(frontend.admin.address, frontend.admin.key)) as admin,
        ):
            started = Running(frontend, shutdown, task, http, channel, admin, asked.name)
            if schedulers and 200 in until_health:  # each poll after that is an HTTP request
                await started.until_open(True)
            await _until_health(started, until_health)
            yield started
    finally:
        shutdown.request()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 60)


async def _serve(frontend: Frontend) -> None:
    try:
        await frontend.run()
    finally:
        await frontend.close()


async def _until_health(started: Running, statuses: Collection[int]) -> None:
    """Polls /health, as for a real process."""

    async def status() -> int:
        try:
            return (await started.http.get("/health")).status_code
        except httpx.ConnectError:
            return 0

    if statuses:
        await eventually(status, lambda found: found in statuses)
