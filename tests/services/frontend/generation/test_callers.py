"""The Python client's calls to a frontend."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire import Client, SamplingParams
from quire.shared.errors import InvalidArgument
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler


async def test_an_error_cancels_all_prompts_of_the_call(folder: Path) -> None:
    """A caller may hold the error for long."""
    async with scheduler(ScriptedScheduler(count_up)) as script, running(folder, script.address) as frontend:
        script.pause()
        with Client(frontend.frontend.grpc_address) as client:
            prompts = [{"prompt_token_ids": [1] * 600}, {"prompt_token_ids": [1] * 3}]
            with pytest.raises(InvalidArgument, match="maximum context length") as held:
                await asyncio.to_thread(client.generate, prompts, SamplingParams(max_tokens=100))
            await frontend.until_idle()
        assert held.value.__traceback__ is not None
