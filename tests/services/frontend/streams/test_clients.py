"""Clients without key and tenant: each address has its own share, and cannot use up that of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from quire.services.frontend.streams.policy import StreamPolicy
from quire.shared.settings.stream_limits import StreamLimits
from tests.redis_server import RedisServer
from tests.services.frontend.running import NO_TLS, Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

ASKED = {"model": "tiny", "input": "hello", "background": True, "max_output_tokens": 400}


@asynccontextmanager
async def client(frontend: Running, address: str) -> AsyncIterator[httpx.AsyncClient]:
    """Returns a client that connects from `address`."""
    transport = httpx.AsyncHTTPTransport(local_address=address, verify=NO_TLS)
    async with httpx.AsyncClient(base_url=frontend.url, transport=transport, timeout=60) as made:
        yield made


async def statuses(http: httpx.AsyncClient, count: int, **headers: str) -> list[int]:
    return [(await http.post("/v1/responses", json=ASKED, headers=headers)).status_code for _ in range(count)]


@pytest.mark.parametrize("is_shared", [False, True])
async def test_background_responses_are_bounded_by_address(
    folder: Path, redis_server: RedisServer, is_shared: bool
) -> None:
    script = ScriptedScheduler(count_up)
    limits = {"per_tenant": 3, "all_tenants": 20}
    redis = redis_server.url if is_shared else "none"
    async with (
        scheduler(script),
        running(folder, script.address, stream_limits=limits, redis=redis) as frontend,
        client(frontend, "127.0.0.1") as greedy,
        client(frontend, "127.0.0.2") as other,
    ):
        script.pause()
        assert await statuses(greedy, 5) == [200, 200, 200, 429, 429]
        assert await statuses(other, 4) == [200, 200, 200, 429]
        assert await statuses(other, 1, **{"x-tenant": "named"}) == [200]
        script.resume()


async def test_background_responses_of_a_client_leave_places_for_others(folder: Path) -> None:
    """They run without their client, so without a bound one address takes all places, with a new tenant each."""
    script = ScriptedScheduler(count_up)
    async with (
        scheduler(script),
        running(folder, script.address, max_inflight_requests=12) as frontend,
        client(frontend, "127.0.0.1") as greedy,
        client(frontend, "127.0.0.2") as other,
    ):
        script.pause()
        assert [(await statuses(greedy, 1, **{"x-tenant": f"t{n}"}))[0] for n in range(5)] == [200] * 3 + [429] * 2
        refused = (await greedy.post("/v1/responses", json=ASKED)).json()["error"]["message"]
        assert "at most 3 may be, 1/4 of max_inflight_requests" in refused
        assert await statuses(other, 1) == [200]
        script.resume()
        async with asyncio.timeout(30):
            while (await statuses(greedy, 1))[0] != 200:
                await asyncio.sleep(0.01)


async def test_keys_of_one_tenant_share_its_background_responses(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    tenants = {"a1": "a", "a2": "a", "b": "b"}
    keys.write_text(
        "keys:\n" + "".join(f"  - {{name: {n}, key: k-{n}-0123456789, tenant: {t}}}\n" for n, t in tenants.items())
    )
    keys.chmod(0o600)
    script = ScriptedScheduler(count_up)
    async with (
        scheduler(script),
        running(folder, script.address, max_inflight_requests=8, api_keys=str(keys)) as frontend,
        client(frontend, "127.0.0.1") as http,
    ):
        script.pause()
        found = [
            (await statuses(http, 1, **{"x-api-key": f"k-{n}-0123456789"}))[0] for n in ("a1", "a2", "a1", "a2", "b")
        ]
        assert found == [200, 200, 429, 429, 200]
        script.resume()


def test_anonymous_clients_have_half_of_all_streams() -> None:
    terms = StreamPolicy(60.0, StreamLimits(per_tenant=3, all_tenants=20))
    assert (terms.store_limits("named").per_tenant, terms.store_limits("").per_tenant) == (3, 10)
    assert StreamPolicy(60.0, StreamLimits(per_tenant=3, all_tenants=4)).store_limits("").per_tenant == 3
