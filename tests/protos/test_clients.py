"""Clients in other languages, where installed, against a frontend."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from quire.shared.rpc.server import Server
from tests.programs import answered
from tests.protos import toolchains
from tests.services.frontend.running import running
from tests.services.frontend.scripted_replies import replying
from tests.services.frontend.scripted_scheduler import Model, Running, ScriptedScheduler, scheduler
from tests.services.frontend.tool_model import tool_model_folder

VERSIONS = ("v1", "v1alpha")


def _slow_where_it_compiles(languages: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in toolchains.SLOW else name for name in languages]


@pytest.fixture(params=_slow_where_it_compiles(toolchains.BUILDS))
def client(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    return toolchains.BUILDS[request.param](tmp_path)


@pytest.fixture(scope="module", params=_slow_where_it_compiles(toolchains.BY_REFLECTION))
def reflected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return toolchains.BY_REFLECTION[request.param](tmp_path_factory.mktemp("reflected"))


def falling_silent(script: ScriptedScheduler, says: Model) -> Model:
    """Stalls the stream after two tokens, without ending it."""

    def model(sequence: Running) -> int:
        if sequence.num_outputs == 1:
            script.pause()
        return says(sequence)

    return model


async def _talks(client: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that texts arrive, calls are cancelled, errors are reported, and a key is sent."""
    folder = tool_model_folder(tmp_path / "talking")
    script = ScriptedScheduler(replying(folder, "It is sunny."), max_model_len=4096)
    async with scheduler(script), running(folder, script.address, api_key="secret") as frontend:
        address = frontend.frontend.grpc_address
        monkeypatch.setenv("QUIRE_API_KEY", "secret")
        assert await answered(*client, address, "How is the weather?") == (0, "It is sunny.", "")
        submission = script.submissions[-1]
        assert (submission.sampling.temperature, submission.max_tokens) == (0, 20)
        script.model = falling_silent(script, script.model)
        status, out, err = await answered(*client, address, "How is the weather?", "cancel")
        await script.until(lambda: script.num_running == 0)
        assert (status, err.strip()) == (0, "CANCELLED")
        assert out in ("I", "It")  # one token or two
        status, out, err = await answered(*client, address, "")
        assert (status, out) == (1, "")
        assert "prompt" in err
        monkeypatch.delenv("QUIRE_API_KEY")
        status, out, err = await answered(*client, address, "How is the weather?")
    assert (status, out) == (1, "")
    assert "API key" in err


async def test_texts_come_calls_are_cancelled_and_errors_are_told(
    client: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _talks(client, tmp_path, monkeypatch)


@pytest.mark.parametrize("version", VERSIONS)
async def test_what_reflection_tells_is_all_that_a_client_needs(
    reflected: list[str], version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _talks([*reflected, version], tmp_path, monkeypatch)


@pytest.mark.parametrize(("services", "error"), [(["a.Service"], "not found"), ([], "quire.inference.v1")])
async def test_a_server_that_does_not_describe_generate_is_an_error_of_one_line(
    reflected: list[str], services: list[str], error: str
) -> None:
    server = Server("127.0.0.1", 0, services)
    await server.start()
    status, out, err = await answered(*reflected, "v1", f"127.0.0.1:{server.port}", "How is the weather?")
    await server.stop(grace_s=0)
    assert (status, out) == (1, "")
    assert error in err
    assert err.count("\n") == 1
