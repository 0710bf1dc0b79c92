"""Tests of a frontend process: its ready line, its signals, its exit status, ports shared by two."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from tests.ports import quiet_port
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

START = """
import json, sys
from quire.services.frontend.main import serve
from quire.shared.process.lifecycle import run
from quire.shared.settings import FrontendSettings
settings = FrontendSettings(**json.loads(sys.argv[1]))
sys.exit(run(lambda shutdown: serve(settings, shutdown)))
"""
BLOCKED = """
import sys
for name in ("torch", "triton", "transformers", "quire.kernels", "redis"):
    sys.modules[name] = None
import quire.services.frontend.main
assert not any(name.startswith(("quire.services.scheduler", "quire.services.worker")) for name in sys.modules)
"""


@asynccontextmanager
async def process(folder: Path, scheduler_address: str, **settings: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    values = {"model": str(folder), "schedulers": [scheduler_address], "grpc_port": 0, "http_port": 0, **settings}
    pipe = asyncio.subprocess.PIPE
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, json.dumps(values), stdout=pipe, stderr=pipe
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def ready(started: asyncio.subprocess.Process) -> dict[str, str]:
    assert started.stdout is not None
    line = (await asyncio.wait_for(started.stdout.readline(), 60)).decode()
    assert line.startswith("quire-frontend ready "), line
    return dict(part.split("=") for part in line.split()[2:])


async def test_the_frontend_announces_serves_and_leaves_on_sigterm(folder: Path) -> None:
    async with scheduler(ScriptedScheduler()) as script, process(folder, script.address, id="f1") as frontend:
        where = await ready(frontend)
        assert where["id"] == "f1"
        async with httpx.AsyncClient(base_url=f"http://{where['http']}") as http:
            reply = await http.post("/v1/completions", json={"prompt": "hello"})
        assert reply.json()["choices"][0]["text"] == "hello"
        frontend.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(frontend.wait(), 60) == 0
    assert [hello.frontend_id for hello in script.hellos] == ["f1"]
    assert script.hellos[0].address == where["grpc"]


async def test_the_ready_line_is_printed_when_it_is_ready(folder: Path) -> None:
    """Checks this where the scheduler starts only later."""
    port = quiet_port()
    async with process(folder, f"127.0.0.1:{port}") as frontend:
        assert frontend.stderr is not None
        while b"no session" not in await asyncio.wait_for(frontend.stderr.readline(), 60):
            pass
        async with scheduler(ScriptedScheduler(), port):
            where = await ready(frontend)
            async with httpx.AsyncClient(base_url=f"http://{where['http']}") as http:
                found = await http.get("/ready")
    assert found.status_code == 200, found.text


@pytest.mark.parametrize(
    ("settings", "warned"), [({}, False), ({"insecure": True, "host": "0.0.0.0"}, True)], ids=["loopback", "everywhere"]
)
async def test_an_open_address_without_keys_is_logged_as_a_warning(
    folder: Path, settings: dict[str, Any], warned: bool
) -> None:
    async with scheduler(ScriptedScheduler()) as script, process(folder, script.address, **settings) as frontend:
        await ready(frontend)
        frontend.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(frontend.communicate(), 60)
    assert (b"there are no API keys: whoever reaches this port may use it" in errors) is warned


async def test_sigterm_lets_a_stream_end_first(folder: Path) -> None:
    script = ScriptedScheduler(count_up, step_s=0.005)
    async with scheduler(script), process(folder, script.address) as frontend:
        where = await ready(frontend)
        async with grpc.aio.insecure_channel(where["grpc"]) as channel:
            request = pb.GenerateRequest(text="x")
            request.sampling.max_tokens = 100
            request.sampling.seed = 1
            tokens: list[int] = []
            async for message in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
                if not tokens:
                    frontend.send_signal(signal.SIGTERM)
                tokens += message.token_ids
        assert len(tokens) == 100
        assert await asyncio.wait_for(frontend.wait(), 60) == 0


async def test_a_mismatched_model_exits_with_one_line_and_status_2(folder: Path) -> None:
    script = ScriptedScheduler()
    script.reject_hello = "model.name: frontend f has 'a', scheduler s has 'b'"
    async with scheduler(script), process(folder, script.address) as frontend:
        _, errors = await asyncio.wait_for(frontend.communicate(), 60)
    assert frontend.returncode == 2
    assert "quire: model.name: frontend f has 'a', scheduler s has 'b'\n" in errors.decode()


async def test_two_frontends_share_their_ports(folder: Path) -> None:
    async with scheduler(ScriptedScheduler()) as script, process(folder, script.address, share_ports=True) as one:
        where = await ready(one)
        ports = {f"{kind}_port": int(where[kind].rpartition(":")[2]) for kind in ("http", "grpc")}
        async with process(folder, script.address, share_ports=True, id="two", **ports) as two:
            there = await ready(two)
            assert (there["http"], there["grpc"]) == (where["http"], where["grpc"])
            assert there["admin"] != where["admin"], "each process has its own"
            assert await _models_over_new_connections(where["http"], 20) == 20
            one.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(one.wait(), 60) == 0
            assert await _models_over_new_connections(where["http"], 5) == 5


async def _models_over_new_connections(address: str, count: int) -> int:
    served = 0
    for _ in range(count):
        async with httpx.AsyncClient() as http:
            served += (await http.get(f"http://{address}/v1/models")).status_code == 200
    return served


@pytest.mark.parametrize("field", ["http_port", "grpc_port", "metrics_port", "admin_port"])
async def test_a_port_in_use_exits_with_one_line_and_status_2(folder: Path, field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with process(folder, "127.0.0.1:1", **{field: port}) as started:
            _, errors = await asyncio.wait_for(started.communicate(), 60)
    assert started.returncode == 2
    (line,) = errors.decode().splitlines()
    assert f"{field}: 127.0.0.1:{port} is in use" in line


async def test_the_frontend_does_not_import_torch() -> None:
    started = await asyncio.create_subprocess_exec(sys.executable, "-c", BLOCKED)
    assert await asyncio.wait_for(started.wait(), 60) == 0
