"""Requests with many prompts are submitted in portions, between which the event loop runs other tasks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from quire.services.frontend.bounds.bodies.heavy_work import TURNS_OF_OTHERS
from quire.services.frontend.generation import generation
from quire.services.frontend.input_processor.prepared_prompt import PromptRequestBuilder
from quire.services.frontend.scheduler_client.client import SchedulerClient
from tests.observing import calls_of
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually, loop_turns

PROMPTS = 400


async def test_a_request_that_needs_ten_turns_waits_for_two_portions_of_a_large_call_at_most(folder: Path) -> None:
    """Counts the prompts of a call that are prepared or submitted within any ten turns of the event loop, which a first
    token of another client needs."""
    turns, done = 0, list[int]()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await loop_turns()

    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        others = asyncio.create_task(count())
        body = {"prompt": ["x"] * PROMPTS, "max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
        with calls_of(PromptRequestBuilder.build, SchedulerClient.submit, on_call=lambda _: done.append(turns)):
            answer = (await frontend.http.post("/v1/completions", json=body)).json()
        others.cancel()
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [2] * PROMPTS
    assert len({str(choice["prompt_token_ids"]) for choice in answer["choices"]}) == 1
    assert len(done) == 2 * PROMPTS
    portion = generation.TOKENS_IN_A_TURN // generation.PER_SAMPLE_COST_TOKENS
    for first, turn in enumerate(done):
        assert sum(later < turn + TURNS_OF_OTHERS for later in done[first:]) <= 2 * portion


async def test_a_disconnect_between_two_portions_leaks_nothing(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        for leave_after in range(1, 12):
            body = {"prompt": ["x"] * PROMPTS, "max_tokens": 50, "ignore_eos": True}
            asking = asyncio.create_task(frontend.http.post("/v1/completions", json=body))
            await loop_turns(4 * leave_after)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await eventually(lambda: not frontend.frontend.ingress.admission.num_samples and (not script.num_running))


async def test_a_large_call_is_admitted_prompt_by_prompt_and_others_are_never_refused(
    folder: Path, tmp_path: Path
) -> None:
    """Limit of sixteen samples, two of which are reserved for tenants with few requests in flight."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": name, "key": f"sk-{name}"} for name in ("large", "small")]}))
    keys.chmod(0o600)
    script, most = ScriptedScheduler(count_up), 0
    settings = {"api_keys": str(keys), "max_inflight_requests": 16}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        large, small = ({"authorization": f"Bearer sk-{name}"} for name in ("large", "small"))
        body = {"prompt": ["x"] * 100, "n": 2, "max_tokens": 20, "ignore_eos": True}
        asking = asyncio.create_task(frontend.http.post("/v1/completions", json=body, headers=large))
        num_answered = 0
        while not asking.done() or num_answered < 5:
            one = {"prompt": "y", "max_tokens": 1}
            answer = await frontend.http.post("/v1/completions", json=one, headers=small)
            assert answer.status_code == 200, answer.text
            num_answered += 1
            most = max(most, script.num_running)
        answered = (await asking).json()
        assert frontend.frontend.ingress.admission.num_samples == 0
    assert [choice["finish_reason"] for choice in answered["choices"]] == ["length"] * 200
    assert [choice["index"] for choice in answered["choices"]] == [*range(200)]
    assert 2 <= most <= 16
