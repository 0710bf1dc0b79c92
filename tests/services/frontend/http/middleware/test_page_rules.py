"""Which web pages may call: DNS rebinding, forms of other sites, preflights.

Sources: open-webui#20604, #13114, openclaw PR 20731, RouteLLM#43, llama-swap#42 (preflights); obsidian-copilot#2877
(any header); gptme PR 3324, colibri PR 993, forge PR 361 (hosts).
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from quire.services.frontend.http.middleware.page_rules import PageRules, host_name, is_loopback
from quire.services.frontend.web_edge.framing import frame
from quire.shared.errors import InvalidArgument, PermissionDenied
from quire.shared.settings import FrontendSettings
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

SERVICE = "/quire.inference.v1.InferenceService"
BODY = {"prompt": "hello", "max_tokens": 2}
LOOPBACK = PageRules.of(FrontendSettings(model="m"), has_keys=False)


def rules(*, has_keys: bool = False, **settings: Any) -> PageRules:
    return PageRules.of(FrontendSettings(model="m", **settings), has_keys=has_keys)


def check(asked: PageRules, host: str | None, method: str = "POST", **sent: str) -> None:
    headers = [] if host is None else [(b"host", host.encode())]
    headers += [(name.replace("_", "-").encode(), value.encode()) for name, value in sent.items()]
    asked.check(method, "/v1/completions", headers)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST:8000",
        "localhost.",
        "127.0.0.1:8000",
        "[::1]:8000",
        "[::1]",
        "a.localhost:1",
    ],
)
def test_names_of_this_machine_are_its_own(host: str) -> None:
    check(LOOPBACK, host)
    check(LOOPBACK, host, "GET")


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "evil.com:8000",
        "localhost.evil.com",
        "127.0.0.1.nip.io:8000",
        "evil-localhost",
        "localhost@evil.com",
        "localhost:8000.evil.com",
        "0.0.0.0:8000",
        "host.docker.internal:8000",
        "192.168.1.5:8000",
        "[::ffff:7f00:1]:8000",
        "",
    ],
)
def test_other_names_are_refused_on_loopback_without_keys(host: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        with pytest.raises(PermissionDenied, match="--allowed-hosts") as refused:
            check(LOOPBACK, host, method)
    assert refused.value.field == "host"
    check(rules(has_keys=True), host)
    check(rules(host="0.0.0.0"), host)
    check(rules(allowed_hosts=("*",)), host)


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"allowed_hosts": ("llm.lan", "box:9000")}, "llm.lan:8000"),
        ({"allowed_hosts": ("llm.lan", "box:9000")}, "box"),
        ({"allowed_hosts": ("LLM.lan",)}, "llm.LAN"),
        ({"allowed_hosts": ("::2",)}, "[::2]:8000"),
        ({"host": "127.0.0.5"}, "127.0.0.5:8000"),
        ({"advertise": "quire.lan"}, "quire.lan:8000"),
    ],
)
def test_names_that_are_set_are_taken(settings: dict[str, Any], host: str) -> None:
    check(rules(**settings), host)
    with pytest.raises(PermissionDenied):
        check(rules(**settings), "evil.com")


def test_hosts_may_be_counted_up_elsewhere_too() -> None:
    for asked in (rules(host="0.0.0.0", allowed_hosts=("llm.lan",)), rules(has_keys=True, allowed_hosts=("llm.lan",))):
        check(asked, "llm.lan")
        check(asked, "localhost:8000")
        with pytest.raises(PermissionDenied):
            check(asked, "evil.com")
        asked.check("GET", "/health", [(b"host", b"10.0.0.7:8000")])  # as a kubelet probes


def test_a_request_needs_exactly_one_host_header() -> None:
    two = [(b"host", b"localhost"), (b"host", b"localhost")]
    for asked in (LOOPBACK, rules(host="0.0.0.0"), rules(has_keys=True)):
        for path in ("/v1/completions", "/health"):
            with pytest.raises(InvalidArgument, match="one Host header, got 2"):
                asked.check("GET", path, two)
        with pytest.raises(InvalidArgument, match="one Host header, got 0"):
            check(asked, None)
        asked.check("GET", "/", [], "1.0")  # probes of older load balancers


@pytest.mark.parametrize(
    ("host", "sent"),
    [
        ("localhost:8000", {}),
        ("localhost:8000", {"origin": "http://localhost:8000"}),
        ("llm.lan", {"origin": "http://llm.lan"}),
        ("llm.lan:443", {"origin": "https://llm.lan"}),
        ("LLM.lan:80", {"origin": "http://llm.lan"}),
        ("127.0.0.1:8000", {"origin": "https://llm.lan", "sec_fetch_site": "same-origin"}),  # a proxy in between
        ("127.0.0.1:8000", {"origin": "chrome-extension://abc", "sec_fetch_site": "none"}),
        ("127.0.0.1:8000", {"origin": "https://app.example", "sec_fetch_site": "cross-site"}),
        ("127.0.0.1:8000", {"origin": "https://app.example"}),
        ("127.0.0.1:8000", {"origin": "http://tauri.localhost"}),  # janhq/jan#8792
        ("127.0.0.1:8000", {"origin": "tauri://localhost"}),  # ollama#2291
        ("192.168.1.5:8000", {"origin": "vscode-file://vscode-app"}),  # ollama PR 9313
        ("192.168.1.5:8000", {"origin": "chrome-extension://bpoadfkcbjbfhfodiogcnhade"}),  # ollama#2425
    ],
)
def test_pages_of_the_server_and_of_named_origins_may_call(host: str, sent: dict[str, str]) -> None:
    check(rules(has_keys=True, cors_origins=("https://app.example",)), host, **sent)


@pytest.mark.parametrize(
    ("host", "sent"),
    [
        ("192.168.1.5:8000", {"origin": "http://evil.com"}),
        ("192.168.1.5:8000", {"origin": "http://192.168.1.5:8001"}),
        ("192.168.1.5:8000", {"origin": "null"}),
        ("192.168.1.5:8000", {"origin": "http://localhost.evil.com"}),
        ("192.168.1.5:8000", {"origin": "tauri://localhost", "sec_fetch_site": "cross-site"}),
        ("192.168.1.5:8000", {"origin": ""}),
        ("evil.com:8000", {"origin": "http://evil.com"}),
        ("127.0.0.1:8000", {"sec_fetch_site": "cross-site"}),
        ("127.0.0.1:8000", {"origin": "null", "sec_fetch_site": "cross-site"}),
        ("127.0.0.1:8000", {"origin": "https://app.example.evil.com"}),
    ],
)
def test_other_pages_may_read_but_not_call(host: str, sent: dict[str, str]) -> None:
    """The browser shows them the answer only if CORS headers permit it."""
    asked = rules(has_keys=True, cors_origins=("https://app.example",))
    with pytest.raises(PermissionDenied, match="cors_origins"):
        check(asked, host, **sent)
    check(asked, host, "GET", **sent)
    check(rules(has_keys=True, cors_origins=("*",)), host, **sent)


def test_addresses_and_names() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")] == [True] * 5
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "frontend", "")] == [False] * 5
    assert [host_name(text) for text in ("::1", "[::1]:5", "a:", "A.B:80", "a:b")] == ["::1", "::1", "a", "a.b", "a:b"]


@pytest_asyncio.fixture
async def keyless(folder: Path) -> AsyncIterator[tuple[Running, ScriptedScheduler]]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, admin_key_file="") as frontend:
        yield frontend, script


async def test_a_rebound_page_reads_nothing_on_any_path(keyless: tuple[Running, ScriptedScheduler]) -> None:
    frontend, script = keyless
    evil = {"host": "evil.com", "origin": "http://evil.com", "sec-fetch-site": "same-origin"}
    document = (await frontend.http.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        if path.removeprefix("/v2") in ("/health", "/ready", "/live", "/health/live", "/health/ready"):
            continue
        for method in operations:
            answer = await frontend.http.request(method, path, headers=evil)
            assert (answer.status_code, "--allowed-hosts evil.com" in answer.text) == (403, True), (method, path)
    for path in ("/", "/docs", "/console/app.js", "/nowhere"):
        assert (await frontend.http.get(path, headers=evil)).status_code == 403
    for kind, body in (("application/proto", b""), ("application/grpc-web", frame(0, b""))):
        headers = {**evil, "content-type": kind}
        answer = await frontend.http.post(f"{SERVICE}/GetModel", content=body, headers=headers)
        assert b"--allowed-hosts" in answer.content
        assert b"quire" not in answer.content.replace(b"--allowed-hosts", b"") or answer.status_code == 403
    assert not script.submissions


async def test_errors_have_the_format_of_the_api(keyless: tuple[Running, ScriptedScheduler]) -> None:
    frontend, _ = keyless
    for path, read in (("/v1/models", "error.message"), ("/v1/messages", "error.message"), ("/api/tags", "error")):
        told: Any = (await frontend.http.get(path, headers={"host": "evil.com"})).json()
        for name in read.split("."):
            told = told[name]
        assert told.startswith("host: 'evil.com' is not a name of this server")


async def test_two_hosts_on_one_request(keyless: tuple[Running, ScriptedScheduler]) -> None:
    frontend, _ = keyless
    host, _, port = frontend.frontend.http_address.rpartition(":")
    for second in (b"evil.com", b"localhost"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: " + second + b"\r\nConnection: close\r\n\r\n"
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_every_path_answers_a_preflight_and_no_trace(folder: Path) -> None:
    """Without an API key, since browsers send none with a preflight."""
    async with running(folder, until_health=(503,), api_key="secret") as frontend:
        document = (await frontend.http.get("/openapi.json", headers={"x-api-key": "secret"})).json()
        paths = {path: {method.upper() for method in found} for path, found in document["paths"].items()}
        paths |= {
            "/": {"GET", "HEAD"},
            "/nowhere": set(),
            f"{SERVICE}/Generate": {"POST"},
            "/v1/load_lora_adapter": {"POST"},
        }
        for path, methods in paths.items():
            asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
            answer = await frontend.http.options(path, headers=asked)
            assert answer.status_code == 204, path
            assert methods | {"OPTIONS"} <= set(answer.headers["allow"].split(", ")), path
            assert not [name for name in answer.headers if name.startswith("access-control")]
            trace = await frontend.http.request("TRACE", path)
            assert (trace.status_code, "error" in trace.json()) == (405, True), path


async def test_pages_of_named_origins_get_cors_headers_with_every_answer(folder: Path) -> None:
    ours = "https://app.example"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-stainless-os, dangerous"}
    asked["access-control-request-private-network"] = "true"
    for origins in ((ours,), ("*",)):
        async with running(folder, until_health=(503,), api_key="secret", cors_origins=origins) as frontend:
            for path in ("/v1/chat/completions", "/nowhere", f"{SERVICE}/Generate"):
                preflight = await frontend.http.options(path, headers={"origin": ours, **asked})
                assert preflight.status_code == 204
                assert preflight.headers["access-control-allow-origin"] == origins[0]
                assert preflight.headers["access-control-allow-headers"] == "x-stainless-os, dangerous"
                assert preflight.headers["access-control-allow-private-network"] == "true"
                assert "POST" in preflight.headers["access-control-allow-methods"]
            refused = await frontend.http.post("/v1/completions", json=BODY, headers={"origin": ours})
            assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origins[0])
            assert "x-ratelimit-limit-requests" in refused.headers["access-control-expose-headers"]
            assert ("vary" in refused.headers) == (origins[0] == ours)
            other = await frontend.http.options("/v1/models", headers={"origin": "https://evil.example", **asked})
            assert ("access-control-allow-origin" in other.headers) == (origins[0] == "*")


async def test_an_open_port_without_keys_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for settings, is_told in (({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "api_key": "k"}, False), ({}, False)):
        caplog.clear()
        async with running(folder, until_health=(503,), advertise="127.0.0.1", **settings):
            pass
        assert ("no API keys are configured" in caplog.text) is is_told


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_as_curl_and_a_proxy_ask(keyless: tuple[Running, ScriptedScheduler]) -> None:
    """By address, by name, with --resolve as a rebound name is, and over HTTP/1.0."""
    frontend, _ = keyless
    port = frontend.frontend.http_address.rpartition(":")[2]
    for args, status in (
        ([f"http://127.0.0.1:{port}/v1/models"], b"200"),
        ([f"http://localhost:{port}/v1/models"], b"200"),
        (["-0", f"http://127.0.0.1:{port}/v1/models"], b"200"),
        (["--resolve", f"evil.example:{port}:127.0.0.1", f"http://evil.example:{port}/v1/models"], b"403"),
        (["-X", "OPTIONS", f"http://127.0.0.1:{port}/v1/chat/completions"], b"204"),
        (
            [
                "-H",
                "Origin: http://evil.example",
                "--json",
                json.dumps(BODY),
                f"http://127.0.0.1:{port}/v1/completions",
            ],
            b"403",
        ),
    ):
        command = ("curl", "-sS", "-4", "-o", "/dev/null", "-w", "%{http_code}", *args)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert out == status, args
