"""Clients in other languages, where these are installed, against a frontend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import answered
from tests.protos import toolchains
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import Model, Running, ScriptedScheduler, scheduler
from tests.services.frontend.speech import saying
from tests.services.frontend.talking import talking_folder

NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in toolchains.SLOW else name for name in toolchains.BUILDS]


@pytest.fixture(params=NAMES)
def client(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    return toolchains.BUILDS[request.param](tmp_path)


def falling_silent(script: ScriptedScheduler, says: Model) -> Model:
    """After two tokens it says no more, and comes to no end."""

    def model(sequence: Running) -> int:
        if sequence.num_outputs == 1:
            script.pause()
        return says(sequence)

    return model


async def test_texts_come_calls_are_cancelled_and_errors_are_told(client: list[str], tmp_path: Path) -> None:
    folder = talking_folder(tmp_path / "talking")
    script = ScriptedScheduler(saying(folder, "It is sunny."), max_model_len=4096)
    async with scheduler(script), running(folder, script.address) as frontend:
        address = frontend.frontend.grpc_address
        assert await answered(*client, address, "How is the weather?") == (0, "It is sunny.", "")
        script.model = falling_silent(script, script.model)
        status, out, err = await answered(*client, address, "How is the weather?", "cancel")
        await script.until(lambda: script.num_running == 0)
        assert (status, err.strip()) == (0, "CANCELLED")
        assert out in ("I", "It")  # one token or two
        status, out, err = await answered(*client, address, "")
    assert (status, out) == (1, "")
    assert "prompt" in err
