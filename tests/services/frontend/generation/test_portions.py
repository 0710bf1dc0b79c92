"""Requests of many prompts are submitted in portions: others have turns of the loop in between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.generation import generation
from quire.services.frontend.scheduler_client.client import SchedulerClient
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually, loop_turns

PROMPTS = 40


async def test_others_have_turns_between_the_prompts_of_one_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, seen, submit = 0, list[int](), SchedulerClient.submit

    def noted(self: SchedulerClient, *given: Any) -> None:
        seen.append(turns)
        submit(self, *given)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await loop_turns()

    monkeypatch.setattr(SchedulerClient, "submit", noted)
    monkeypatch.setattr(generation, "TOKENS_IN_A_TURN", 4 * generation.LIKE_TOKENS)
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        others = asyncio.create_task(count())
        body = {"prompt": ["x"] * PROMPTS, "max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
        answer = (await frontend.http.post("/v1/completions", json=body)).json()
        others.cancel()
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [2] * PROMPTS
    assert len({str(choice["prompt_token_ids"]) for choice in answer["choices"]}) == 1
    assert len(seen) == PROMPTS
    assert len(set(seen)) > PROMPTS // 5


async def test_a_client_that_leaves_between_two_portions_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "TOKENS_IN_A_TURN", 0)
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        for leave_after in range(1, 12):
            body = {"prompt": ["x"] * PROMPTS, "max_tokens": 50, "ignore_eos": True}
            asking = asyncio.create_task(frontend.http.post("/v1/completions", json=body))
            await loop_turns(4 * leave_after)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await eventually(lambda: not frontend.frontend.door.admission.num_samples and (not script.num_running))
