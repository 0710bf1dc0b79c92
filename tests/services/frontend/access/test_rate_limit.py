"""x-ratelimit headers: limits per key, and limits on requests in flight (litellm#5957, vercel/ai#5223)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from quire.services.frontend.access.account import Account
from quire.services.frontend.access.api_key import ApiKey
from quire.services.frontend.access.rate_limit import RateLimit, duration, rate_limit_headers
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

ASKED = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
WORK: dict[str, dict[str, Any]] = {
    "/v1/completions": ASKED,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/api/generate": {"model": "tiny", "prompt": "hi", "stream": False, "options": {"num_predict": 2}},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
}


def shown(answer: httpx.Response) -> dict[str, str]:
    return {
        name.removeprefix("x-ratelimit-"): value
        for name, value in answer.headers.items()
        if name.startswith("x-ratelimit-")
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-3, "0s"),
        (0.0001, "1ms"),
        (0.02, "20ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (8.64, "8.64s"),
        (60, "1m0s"),
        (179.56, "2m59.56s"),
        (360, "6m0s"),
        (3630, "1h0m30s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_what_is_overdrawn_is_nothing() -> None:
    told = dict(rate_limit_headers([RateLimit("tokens", 100, -50.5, 90.0)]))
    assert told == {
        b"x-ratelimit-limit-tokens": b"100",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"1m30s",
    }


def test_an_account_reports_what_is_left_and_when_it_is_full_again() -> None:
    now = [100.0]
    key = ApiKey(name="a", requests_per_minute=60, tokens_per_minute=600)
    account = Account(key, lambda: now[0], lambda: 0.0)
    assert account.rate_limits() == [RateLimit("requests", 60, 60.0, 0.0), RateLimit("tokens", 600, 600.0, 0.0)]
    account.admit_request(key)
    account.charge(700)
    assert account.rate_limits() == [RateLimit("requests", 60, 59.0, 1.0), RateLimit("tokens", 600, -100.0, 70.0)]
    now[0] += 30
    assert account.rate_limits() == [RateLimit("requests", 60, 60.0, 0.0), RateLimit("tokens", 600, 200.0, 40.0)]
    assert Account(ApiKey(name="b", tokens_per_day=5), lambda: 0.0, lambda: 0.0).rate_limits() == []


def keys(folder: Path) -> str:
    path = folder / "keys.yaml"
    listed = [
        {"name": "both", "key": "b", "requests_per_minute": 2, "tokens_per_minute": 1000},
        {"name": "requests", "key": "r", "requests_per_minute": 600},
        {"name": "free", "key": "f"},
    ]
    path.write_text(yaml.safe_dump({"keys": listed}))
    path.chmod(0o600)
    return str(path)


async def test_quotas_of_a_key_stand_in_its_answers(folder: Path, tmp_path: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_keys=keys(tmp_path)) as frontend:

        async def ask(key: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
            return await frontend.http.post(path, json={**WORK[path], **more}, headers={"x-api-key": key})

        first, second, third = [await ask("b", stream=stream) for stream in (False, True, False)]
        assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
        told = [shown(answer) for answer in (first, second, third)]
        assert [one["limit-requests"] for one in told] == ["2", "2", "2"]
        assert [one["remaining-requests"] for one in told] == ["1", "0", "0"]
        assert [one["limit-tokens"] for one in told] == ["1000"] * 3
        assert int(told[2]["remaining-tokens"]) < 1000, "includes the usage of the earlier answers"
        assert told[2]["reset-requests"][-1] == "s"
        only = shown(await ask("r"))
        assert set(only) == {"limit-requests", "remaining-requests", "reset-requests"}
        for path in WORK:  # an eighth is reserved for tenants with few requests in flight
            assert shown(await ask("f", path))["limit-requests"] == "896", path
        listed = await frontend.http.get("/v1/models", headers={"x-api-key": "b"})
        assert not shown(listed)
        client = openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="r", max_retries=0)
        raw = await client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=1)
        assert raw.headers["x-ratelimit-limit-requests"] == "600"
        await client.close()


async def test_without_quotas_it_is_what_may_be_in_flight(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    limits = {"max_inflight_requests": 2, "max_queued_tokens": 500, "retry_after_ms": 1500}
    async with scheduler(script), running(folder, script.address, **limits) as frontend:
        free = await frontend.http.post("/v1/completions", json=ASKED)
        script.pause()
        held = [asyncio.ensure_future(frontend.http.post("/v1/completions", json=ASKED)) for _ in range(2)]
        await script.until(lambda: script.num_running == 2)
        full = await frontend.http.post("/v1/completions", json=ASKED)
        script.resume()
        for one in held:
            await one
    assert shown(free)["limit-requests"] == "2"
    assert shown(free)["remaining-requests"] == "1"
    assert full.status_code == 429
    assert shown(full)["remaining-requests"] == "0"
    assert shown(full)["reset-requests"] == "1.5s"
    assert shown(full)["limit-tokens"] == "500"
