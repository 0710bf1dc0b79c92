"""Connections that end unexpectedly are reopened; one that makes no progress fails the liveness check."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.services.frontend.composition.timing import FrontendTiming
from quire.services.frontend.scheduler_client.connection import Connection, ConnectionTiming
from quire.services.frontend.scheduler_client.session import Session
from quire.shared.rpc.server import LIVENESS, NOT_SERVING, SERVING
from tests.services.frontend.running import Running, running
from tests.services.frontend.scheduler_client.test_sessions import COUNTED, COUNTING, tokens_of
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually


@pytest.mark.parametrize("error", [asyncio.CancelledError, ValueError, SystemError])
@pytest.mark.parametrize("where", [(Session, "run"), (Connection, "connect_once"), (Connection, "_wait_to_reconnect")])
async def test_a_connection_that_ends_unasked_is_back_and_costs_no_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], where: tuple[type, str]
) -> None:
    """grpc.aio raises CancelledError from a write after the call was cancelled on this side."""
    owner, name = where
    work: Callable[..., object] = getattr(owner, name)
    num_calls = 0

    async def ends(*arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise error
        return await work(*arguments)  # type: ignore[misc]

    monkeypatch.setattr(owner, name, ends)
    script = ScriptedScheduler(count_up, step_s=0.002)
    async with scheduler(script), running(folder, script.address) as frontend:
        script.break_sessions()
        messages = [message async for message in frontend.inference.Generate(COUNTING)]
    assert num_calls, "the faulty call was never reached"
    assert tokens_of(messages) == COUNTED


async def liveness_of(frontend: Running) -> object:
    stub = health_pb2_grpc.HealthStub(frontend.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS))).status


async def until_liveness(frontend: Running, wanted: object) -> None:
    await eventually(lambda: liveness_of(frontend), lambda found: found == wanted)


IMPATIENT = FrontendTiming(liveness_check_s=0.02, connection_attempt_s=0.4)


async def test_a_connection_that_is_never_tried_again_is_dead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, goes_on = Connection.connect_once, asyncio.Event()

    async def hangs(*arguments: object) -> None:
        await goes_on.wait()
        await attempt(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "connect_once", hangs)
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, until_health=(503,), timing=IMPATIENT) as frontend:
        await until_liveness(frontend, NOT_SERVING)
        goes_on.set()
        await until_liveness(frontend, SERVING)
        await eventually(lambda: frontend.http.get("/health"), lambda found: found.status_code == 200)


async def test_a_scheduler_that_is_away_is_no_death_of_the_frontend(folder: Path) -> None:
    """Sixty attempts and their pauses take longer than one attempt may."""
    short = ConnectionTiming(longest_pause_s=0.1)
    timing = FrontendTiming(connections=short, liveness_check_s=0.02, connection_attempt_s=3.0)
    async with running(folder, "127.0.0.1:1", until_health=(503,), timing=timing) as frontend:
        attempts = frontend.frontend.core.client.connections.reconnect_attempts
        async with asyncio.timeout(60):
            while int(str(attempts()["connection to 127.0.0.1:1"])) < 60:
                assert await liveness_of(frontend) == SERVING
