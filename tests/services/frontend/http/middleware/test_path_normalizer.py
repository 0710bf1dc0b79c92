"""Paths as proxies and clients write them; open-webui#12117 asks for /v1//models."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.services.frontend.http.middleware.path_normalizer import normalize_path
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler


@pytest.mark.parametrize(
    ("sent", "root", "found"),
    [
        ("/v1/models", "", "/v1/models"),
        ("/v1//models", "", "/v1/models"),
        ("//v1///models//", "", "/v1/models"),
        ("/", "", "/"),
        ("//", "", "/"),
        ("/llm/v1/models", "/llm", "/v1/models"),
        ("/llm//v1/models/", "/llm", "/v1/models"),
        ("//llm/v1/models", "/llm", "/v1/models"),
        ("/llmv1/models", "/llm", "/llmv1/models"),
    ],
)
def test_a_path_is_the_servers_own(sent: str, root: str, found: str) -> None:
    assert normalize_path(sent.encode(), root.encode()).decode() == found


async def test_guards_see_the_path_that_is_served(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_key="secret") as frontend:
        host, _, port = frontend.frontend.http_address.rpartition(":")
        for target, key, status in (
            ("/v1//models", "secret", b"200"),
            ("/v1//models", "", b"401"),
            ("//v1/models", "", b"401"),
            ("//health", "", b"200"),
            ("/v1//load_lora_adapter", "secret", b"401"),
            ("/v1//completions", "secret", b"400"),
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            method = "POST" if "lora" in target or "completions" in target else "GET"
            head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: 0\r\n\r\n".encode())
            assert (await reader.read())[9:12] == status, target
            writer.close()


async def test_work_is_refused_under_doubled_slashes_too(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, max_inflight_requests=1) as frontend:
        with frontend.frontend.ingress.admission.lease() as lease:
            lease.acquire(1, 0)
            refused = await frontend.http.post("/v1//completions", json={"prompt": "x"})
    assert refused.status_code == 429
