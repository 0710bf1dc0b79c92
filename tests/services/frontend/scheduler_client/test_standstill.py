"""Connections that end in ways nobody asked for come back; one that does nothing at all is seen in liveness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.services.frontend.composition import health
from quire.services.frontend.scheduler_client.connection import Connection
from quire.services.frontend.scheduler_client.session import Session
from quire.shared.process import liveness
from quire.shared.rpc.server import LIVENESS, NOT_SERVING, SERVING
from tests.services.frontend.running import Running, running
from tests.services.frontend.scheduler_client.test_sessions import COUNTED, COUNTING, tokens_of
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually


@pytest.mark.parametrize("error", [asyncio.CancelledError, ValueError, SystemError])
@pytest.mark.parametrize("where", [(Session, "run"), (Connection, "connect_once"), (Connection, "_rest")])
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
    assert num_calls, "it came to that"
    assert tokens_of(messages) == COUNTED


async def liveness_of(frontend: Running) -> object:
    stub = health_pb2_grpc.HealthStub(frontend.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS))).status


async def until_liveness(frontend: Running, wanted: object) -> None:
    await eventually(lambda: liveness_of(frontend), lambda found: found == wanted)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "LOOK_S", 0.02)
    monkeypatch.setattr(health, "ATTEMPT_TIMEOUT_S", 0.4)


@pytest.mark.usefixtures("_impatient")
async def test_a_connection_that_is_never_tried_again_is_dead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, goes_on = Connection.connect_once, asyncio.Event()

    async def hangs(*arguments: object) -> None:
        await goes_on.wait()
        await attempt(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "connect_once", hangs)
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, until_health=(503,)) as frontend:
        await until_liveness(frontend, NOT_SERVING)
        goes_on.set()
        await until_liveness(frontend, SERVING)
        await eventually(lambda: frontend.http.get("/health"), lambda found: found.status_code == 200)


@pytest.mark.usefixtures("_impatient")
async def test_a_scheduler_that_is_away_is_no_death_of_the_frontend(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ATTEMPT_TIMEOUT_S", 10.0)  # 500 looks: an attempt and its pause take less
    looked = asyncio.Event()
    look, num_looks = liveness.Liveness.look, 0

    def counted(self: liveness.Liveness) -> None:
        nonlocal num_looks
        look(self)
        num_looks += 1
        if num_looks > 200:
            looked.set()

    monkeypatch.setattr(liveness.Liveness, "look", counted)
    async with running(folder, "127.0.0.1:1", until_health=(503,)) as frontend:
        await asyncio.wait_for(looked.wait(), 60)
        assert await liveness_of(frontend) == SERVING
