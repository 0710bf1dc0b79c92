"""Clients without key and tenant: each address has its own share, and cannot use up that of others."""

from __future__ import annotations

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


def test_anonymous_clients_have_half_of_all_streams() -> None:
    terms = StreamPolicy(60.0, StreamLimits(per_tenant=3, all_tenants=20))
    assert (terms.store_limits("named").per_tenant, terms.store_limits("").per_tenant) == (3, 10)
    assert StreamPolicy(60.0, StreamLimits(per_tenant=3, all_tenants=4)).store_limits("").per_tenant == 3
