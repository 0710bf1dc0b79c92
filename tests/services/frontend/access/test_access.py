"""API keys at every edge: authentication, tenant and limits."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import redis
from grpc_reflection.v1alpha import reflection_pb2

from quire.async_client import AsyncClient
from quire.services.frontend.access.access import Access
from quire.services.frontend.access.account import DAY_S, Account
from quire.services.frontend.access.api_key import ApiKey, digest, parse_key
from quire.services.frontend.access.sources import KeyFile
from quire.services.frontend.composition.timing import FrontendTiming
from quire.shared.errors import InvalidArgument, PermissionDenied, ResourceExhausted, Unauthenticated
from quire.shared.kv import block_hash
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.redis_server import RedisServer
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually

PATHS = [
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/batch"),
    ("POST", "/invocations"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/input_tokens"),
    ("GET", "/v1/responses/resp_1"),
    ("POST", "/v1/messages"),
    ("POST", "/api/chat"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/file-1/content"),
    ("POST", "/v1/batches"),
    ("GET", "/api/tags"),
    ("POST", "/generate"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/tokenizer_info"),
    ("GET", "/docs"),
    ("GET", "/redoc"),
    ("GET", "/openapi.json"),
    ("GET", "/load"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/nowhere"),
]
SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 3}


def key_file(folder: Path, *entries: dict[str, Any]) -> str:
    path = folder / "keys.yaml"
    path.write_text(json.dumps({"keys": list(entries)}))
    path.chmod(0o600)
    return str(path)


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "key": f"sk-{name}", **fields}


def shows_secret(scheme: str) -> dict[str, str]:
    return {"authorization": f"{scheme} secret"}


def shows(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{name}"}


def spoil(path: str) -> None:
    Path(path).write_text("keys: [")


async def complete(frontend: Running, name: str, **body: Any) -> httpx.Response:
    return await frontend.http.post("/v1/completions", json={**SHORT, **body}, headers=shows(name))


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_every_path_needs_a_key(folder: Path, method: str, path: str) -> None:
    async with running(folder, until_health=(503,), api_key="secret") as frontend:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "secrets"}, {"authorization": "secret"}):
            refused = await frontend.http.request(method, path, headers=headers, json={} if method == "POST" else None)
            assert refused.status_code == 401, headers
            assert refused.headers["www-authenticate"] == "Bearer"
            assert "API key" in json.dumps(refused.json())
        for headers in (shows_secret("Bearer"), shows_secret("bearer"), {"x-api-key": "secret"}):
            answer = await frontend.http.request(method, path, headers=headers, json={} if method == "POST" else None)
            assert answer.status_code != 401
        for probe in ("/health", "/ready", "/ping"):
            assert (await frontend.http.get(probe)).status_code == 503


@pytest.mark.parametrize(
    "path", ["//v1/models", "/V1/models", "/v1/../v1/models", "/health/../v1/models", "/%761/models"]
)
async def test_no_spelling_of_a_path_gets_around_the_key(folder: Path, path: str) -> None:
    async with running(folder, until_health=(503,), api_key="secret") as frontend:
        request = httpx.Request("GET", frontend.url)
        request.url = httpx.URL(frontend.url).copy_with(raw_path=path.encode())
        assert (await frontend.http.send(request)).status_code == 401


async def test_a_key_that_is_shown_twice_is_not_shown(folder: Path) -> None:
    async with running(folder, until_health=(503,), api_key="secret") as frontend:
        twice = [("authorization", "Bearer wrong"), ("authorization", "Bearer secret")]
        assert (await frontend.http.get("/v1/models", headers=twice)).status_code == 401
        for key in ("wrong", "secret"):
            twice = [("authorization", f"Bearer {key}"), ("authorization", "Bearer secret")]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await frontend.inference.ListModels(pb.ListModelsRequest(), metadata=twice)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_work_is_continued_only_for_its_own_tenant(tmp_path: Path) -> None:
    """The key's name may belong to another tenant by now, or keys may have been configured since."""
    keys = KeyFile(key_file(tmp_path, entry("a", tenant="x"), {**entry("b", tenant="y"), "name": "a"}), lambda: None)
    access = Access([keys], FrontendMetrics("tiny", 64), lambda: 0.0)
    for tenant in ("x", "y"):
        found = access.find_caller("a", tenant)
        assert found is not None
        assert found.tenant == tenant
    for name, tenant in (("a", "z"), ("c", "x"), ("", "x")):
        with pytest.raises(PermissionDenied):
            access.find_caller(name, tenant)
    assert Access([], FrontendMetrics("tiny", 64), lambda: 0.0).find_caller("", "x") is None


async def test_a_file_without_keys_refuses_every_call(folder: Path, tmp_path: Path) -> None:
    """Keys of the previous file are refused as well."""
    keys = key_file(tmp_path, entry("a"))
    async with running(folder, until_health=(503,), api_keys=keys) as frontend:
        assert (await frontend.http.get("/v1/models", headers=shows("a"))).status_code == 200
        key_file(tmp_path)
        os.utime(keys, (1, 1))
        assert (await frontend.http.get("/v1/models", headers=shows("a"))).status_code == 401


async def test_some_paths_can_be_opened(folder: Path) -> None:
    async with running(folder, until_health=(503,), api_key="secret", open_paths=("/metrics",)) as frontend:
        assert (await frontend.http.get("/metrics")).status_code == 200
        assert (await frontend.http.get("/load")).status_code == 401


async def test_every_grpc_method_needs_a_key(folder: Path) -> None:
    async with running(folder, until_health=(503,), api_key="secret") as frontend:
        calls = [
            frontend.inference.ListModels(pb.ListModelsRequest()),
            frontend.inference.GetModel(pb.GetModelRequest()),
            frontend.inference.Tokenize(pb.TokenizeRequest(text="x")),
            frontend.inference.Detokenize(pb.DetokenizeRequest(token_ids=[1])),
            frontend.inference.Tokenize(pb.TokenizeRequest(text="x"), metadata=(("x-api-key", "wrong"),)),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        reflections = [_reflect(frontend, version) for version in ("v1", "v1alpha")]
        for stream in (frontend.inference.Generate(pb.GenerateRequest(text="x")), *reflections):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                [message async for message in stream]
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for shown in (("authorization", "Bearer secret"), ("x-api-key", "secret")):
            assert (await frontend.inference.ListModels(pb.ListModelsRequest(), metadata=(shown,))).models


def _reflect(frontend: Running, version: str) -> Any:
    ask = frontend.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    return ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))


async def test_the_python_client_shows_its_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduler(ScriptedScheduler()) as script, running(folder, script.address, api_key="secret") as frontend:
        for api_key, variable in (("secret", ""), ("", "secret")):
            monkeypatch.setenv("QUIRE_API_KEY", variable)
            async with AsyncClient(frontend.frontend.grpc_address, api_key=api_key) as client:
                assert (await client.generate("x")).outputs
        monkeypatch.delenv("QUIRE_API_KEY")
        async with AsyncClient(frontend.frontend.grpc_address) as client:
            with pytest.raises(Unauthenticated, match="no API key"):
                await client.generate("x")


async def test_the_tenant_is_the_keys_whatever_the_request_says(folder: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("a", tenant="alpha"), entry("b"))
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_keys=keys) as frontend:
        for name in ("a", "b"):
            headers = {**shows(name), "x-tenant": "victim"}
            body = {**SHORT, "tenant": "victim", "cache_salt": "s"}
            assert (await frontend.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        request = pb.GenerateRequest(text="x", options=pb.RequestOptions(tenant="victim", cache_salt="s"))
        metadata = (("authorization", "Bearer sk-a"), ("x-tenant", "victim"))
        _ = [message async for message in frontend.inference.Generate(request, metadata=metadata)]
    assert [s.tenant for s in script.submissions] == ["alpha", "b", "alpha"]
    first, other, again = (s.root_hash for s in script.submissions)
    assert first == again != other
    assert block_hash.root_hash(salt="s") not in (first, other)


async def test_metrics_on_the_client_port_omit_other_tenants(folder: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("a", tenant="alpha"), entry("b"))
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address, api_keys=keys, metrics_port=0) as frontend:
        reply = await frontend.http.post("/v1/completions", json={**SHORT, "n": 0}, headers=shows("a"))
        assert reply.status_code == 400
        shown = (await frontend.http.get("/metrics", headers=shows("b"))).text
        own = frontend.frontend.metrics_address
        async with httpx.AsyncClient() as operator:
            told = (await operator.get(f"http://{own}/metrics")).text
    assert "alpha" not in shown
    assert "vllm:request_success_total" in shown
    assert 'quire_frontend_tenant_calls_total{outcome="failed",tenant="alpha"} 1.0' in told
    assert "vllm:request_success_total" in told


async def test_prefixes_of_tenants_are_apart_without_a_salt_of_theirs(folder: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("a"), entry("b"))
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_keys=keys) as frontend:
        for name in ("a", "b", "a"):
            await complete(frontend, name)
    hashes = [s.root_hash for s in script.submissions]
    assert hashes[0] == hashes[2] != hashes[1]
    assert block_hash.root_hash() not in hashes


async def test_stored_responses_belong_to_a_tenant(folder: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("a"), entry("b"))
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_keys=keys) as frontend:
        body = {"model": "tiny", "input": "x", "max_output_tokens": 3}
        made = (await frontend.http.post("/v1/responses", json=body, headers=shows("a"))).json()
        path = f"/v1/responses/{made['id']}"
        for claim in ({}, {"x-tenant": "a"}):
            theirs = {**shows("b"), **claim}
            assert (await frontend.http.get(path, headers=theirs)).status_code == 404
            assert (await frontend.http.get(f"{path}/input_items", headers=theirs)).status_code == 404
            assert (await frontend.http.delete(path, headers=theirs)).status_code == 404
            more = {**body, "previous_response_id": made["id"], "tenant": "a"}
            assert (await frontend.http.post("/v1/responses", json=more, headers=theirs)).status_code == 404
        assert (await frontend.http.get(path, headers=shows("a"))).json()["id"] == made["id"]
        assert (await frontend.http.delete(path, headers=shows("a"))).status_code == 200


async def test_stored_responses_belong_to_the_tenant_that_is_named_where_there_are_no_keys(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        body = {"model": "tiny", "input": "x", "max_output_tokens": 3}
        made = (await frontend.http.post("/v1/responses", json=body, headers={"x-tenant": "a"})).json()
        path = f"/v1/responses/{made['id']}"
        assert (await frontend.http.get(path, headers={"x-tenant": "b"})).status_code == 404
        assert (await frontend.http.get(path)).status_code == 404
        assert (await frontend.http.get(path, headers={"x-tenant": "a"})).status_code == 200


async def test_a_key_can_be_for_some_models_only(folder: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("a", models=["other"]))
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_keys=keys) as frontend:
        refused = await complete(frontend, "a")
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
        client = AsyncClient(frontend.frontend.grpc_address, api_key="sk-a")
        with pytest.raises(PermissionDenied):
            await client.generate("x")
        await client.close()
    assert script.submissions == []


async def test_a_key_bounds_the_priorities_that_may_be_asked_for(folder: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("a", most_urgent_priority=0, highest_kv_priority="normal"), entry("b"))
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_keys=keys) as frontend:

        async def ask(name: str, **asked: Any) -> tuple[int, str | None]:
            reply = await frontend.http.post("/v1/completions", json={**SHORT, **asked}, headers=shows(name))
            return reply.status_code, reply.json().get("error", {}).get("param")

        assert await ask("a", priority=-1) == (403, "priority")
        assert await ask("a", kv_priority="high") == (403, "kv_priority")
        assert await ask("b", kv_priority="high") == (200, None)
        assert await ask("a", kv_priority="normal") == (200, None)
        assert await ask("a", kv_priority="low") == (200, None)
        request = pb.GenerateRequest(text="x", options=pb.RequestOptions(kv_priority="high"))
        call = frontend.inference.Generate(request, metadata=(("authorization", "Bearer sk-a"),))
        with pytest.raises(grpc.aio.AioRpcError, match="permits at most 'normal'"):
            _ = [message async for message in call]
        await frontend.until_idle(**shows("b"))  # the refusal is sent before the lease is released
    assert len(script.submissions) == 3


async def test_a_rate_is_kept_and_says_when_to_come_back(folder: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("a", requests_per_minute=2), entry("b"))
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_keys=keys) as frontend:
        assert [(await complete(frontend, "a")).status_code for _ in range(2)] == [200, 200]
        refused = await complete(frontend, "a")
        assert refused.status_code == 429
        assert refused.json()["error"]["param"] == "requests_per_minute"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (await complete(frontend, "b")).status_code == 200
        await frontend.until_idle(**shows("b"))


async def test_tokens_are_counted_at_the_end(folder: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("a", tokens_per_day=4))
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_keys=keys) as frontend:
        assert (await complete(frontend, "a")).status_code == 200
        refused = await complete(frontend, "a")
    assert (refused.status_code, refused.json()["error"]["param"]) == (429, "tokens_per_day")


def test_an_account_fills_up_and_forgets_yesterday() -> None:
    now = [0.0]
    key = parse_key({"name": "a", "requests_per_minute": 60, "tokens_per_minute": 600, "tokens_per_day": 1000}, "")
    account = Account(key, lambda: now[0], lambda: now[0])
    account.admit_request(key)
    account.charge(700)
    with pytest.raises(ResourceExhausted, match="tokens_per_minute") as refused:
        account.admit_request(key)
    assert refused.value.retry_after_ms == 10_100
    now[0] += 10.2
    account.admit_request(key)
    account.charge(300)
    now[0] += 60
    with pytest.raises(ResourceExhausted, match="tokens_per_day") as refused:
        account.admit_request(key)
    assert refused.value.retry_after_ms == round(1000 * (DAY_S - now[0]))
    now[0] = DAY_S
    account.admit_request(key)


def test_use_without_a_limit_does_not_count_against_a_later_limit() -> None:
    now = [0.0]
    free = parse_key({"name": "a"}, "")
    account = Account(free, lambda: now[0], lambda: now[0])
    for _ in range(1000):
        account.admit_request(free)
        account.charge(1000)
    limited = parse_key({"name": "a", "requests_per_minute": 60, "tokens_per_minute": 60_000}, "")
    account.admit_request(free)
    now[0] += 60
    for _ in range(60):
        account.admit_request(limited)
    with pytest.raises(ResourceExhausted, match="requests_per_minute"):
        account.admit_request(limited)


async def test_the_file_is_read_again_and_a_broken_one_changes_nothing(folder: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("a"))
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, api_keys=keys, open_paths=("/metrics",)) as frontend:
        assert (await complete(frontend, "b")).status_code == 401
        key_file(tmp_path, entry("b"))
        os.utime(keys, (1, 1))
        assert (await complete(frontend, "b")).status_code == 200
        assert (await complete(frontend, "a")).status_code == 401
        spoil(keys)
        assert (await complete(frontend, "b")).status_code == 200
        assert (await complete(frontend, "b")).status_code == 200
        metrics = await frontend.metrics()
    assert metrics["quire_frontend_access_errors_total"] == 1
    assert metrics["quire_frontend_access_refusals_total{reason=unknown}"] == 2


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (["x"], "entry 1: must be a mapping"),
        ([{"name": "a"}], "entry 1: must have exactly one of `key` and `sha256`"),
        ([{"name": "a", "key": "very-secret", "rate": 3}], "rate: Extra inputs"),
        ([{"name": "a b", "key": "very-secret"}], "name: String should match"),
        ([{"name": "a", "sha256": "12"}], "64 hexadecimal digits"),
        ([entry("a"), {**entry("a"), "name": "b"}], "entry 2 repeats the key of a"),
    ],
)
def test_a_file_that_is_no_use_is_refused_without_its_secrets(tmp_path: Path, entries: list[Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match="api_keys") as refused:
        KeyFile(key_file(tmp_path, *entries), lambda: None)
    assert text in refused.value.message
    assert "very-secret" not in refused.value.message


def test_a_file_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path, entry("a"))
    Path(path).chmod(0o644)
    with pytest.raises(InvalidArgument, match="chmod o-rwx"):
        KeyFile(path, lambda: None)


def test_a_file_may_hold_hashes_instead_of_keys(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"sk-a").hexdigest()
    keys = KeyFile(key_file(tmp_path, {"name": "a", "sha256": hashed}), lambda: None).keys()
    assert keys[digest(b"sk-a")] == ApiKey.model_validate({"name": "a", "tenant": "a"})


async def test_keys_in_redis_outlive_it(folder: Path, tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        store = redis.Redis.from_url(server.url)
        store.hset("quire:api_keys", hashlib.sha256(b"sk-a").hexdigest(), json.dumps({"name": "a"}))
        script = ScriptedScheduler(count_up)
        settings = {"api_keys": "redis", "redis": server.url, "timing": FrontendTiming(key_reload_s=0.02)}
        async with scheduler(script), running(folder, script.address, **settings) as frontend:
            await _until(frontend, "a", 200)
            assert (await complete(frontend, "b")).status_code == 401
            store.hset("quire:api_keys", hashlib.sha256(b"sk-b").hexdigest(), json.dumps({"name": "b"}))
            await _until(frontend, "b", 200)
            server.stop()
            assert (await complete(frontend, "a")).status_code == 200
            assert (await complete(frontend, "c")).status_code == 401
        store.close()
    finally:
        server.stop()


async def _until(frontend: Running, name: str, status: int) -> None:
    for _ in range(2000):
        if (await complete(frontend, name)).status_code == status:
            return
    raise AssertionError(f"{name} never got {status}")


async def test_pages_of_named_origins_may_call(folder: Path) -> None:
    origin = "https://app.example"
    async with running(folder, until_health=(503,), api_key="secret", cors_origins=(origin,)) as frontend:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        allowed = await frontend.http.options("/v1/chat/completions", headers={"origin": origin, **asks})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (204, origin)
        assert allowed.headers["access-control-allow-headers"] == "authorization"
        other = await frontend.http.options("/v1/chat/completions", headers={"origin": "https://evil.example", **asks})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (204, False)
        refused = await frontend.http.get("/v1/models", headers={"origin": origin})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)


async def test_without_the_setting_no_page_may_call(folder: Path) -> None:
    async with running(folder, until_health=(503,)) as frontend:
        answer = await frontend.http.get("/v1/models", headers={"origin": "https://app.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:1"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "https://app.example"}, 200),
        ({"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({}, 200),
    ],
)
async def test_what_a_page_of_another_origin_sends_without_asking_is_refused(
    folder: Path, sent: dict[str, str], status: int
) -> None:
    """A body without content type, such as an untyped Blob, needs no preflight."""
    script = ScriptedScheduler(count_up)
    origins = ("https://app.example",)
    async with scheduler(script), running(folder, script.address, cors_origins=origins) as frontend:
        answer = await frontend.http.post("/v1/completions", content=json.dumps(SHORT), headers=sent)
        assert answer.status_code == status
    assert bool(script.submissions) is (status == 200)


@asynccontextmanager
async def taken_up(folder: Path, tmp_path: Path, **settings: Any) -> AsyncIterator[Running]:
    """A frontend with three tenants, one of which has used up its share."""
    keys = key_file(tmp_path, *(entry(name, tenant=name) for name in ("large", "small", "third")))
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address, api_keys=keys, **settings) as frontend:
        call = complete(frontend, "large", prompt=["x"] * 16)
        held = asyncio.create_task(call)
        await script.until(lambda: script.num_running == 14)  # the other two prompts wait for the tenant's share
        yield frontend
        script.resume()
        assert (await held).status_code == 200
        await frontend.until_idle(**shows("large"))


async def test_a_call_with_many_prompts_leaves_a_share_to_other_tenants(folder: Path, tmp_path: Path) -> None:
    async with taken_up(folder, tmp_path, max_inflight_requests=16) as frontend:
        refused = await complete(frontend, "large")
        assert refused.status_code == 429
        assert "reserved for tenants with few requests in flight" in refused.json()["error"]["message"]
        message = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(max_tokens=1))
        over_grpc = frontend.inference.Generate(message, metadata=tuple(shows("large").items()))
        with pytest.raises(grpc.aio.AioRpcError, match="reserved for tenants with few requests in flight"):
            await over_grpc.read()
        waiting = [asyncio.create_task(complete(frontend, name)) for name in ("small", "third")]
        await eventually(lambda: frontend.frontend.ingress.admission.num_samples >= 16)
    assert [(await call).status_code for call in waiting] == [200, 200]


async def test_another_tenant_is_admitted_over_grpc_as_well(folder: Path, tmp_path: Path) -> None:
    message = pb.GenerateRequest(text="x", sampling=sampling_pb2.SamplingParams(max_tokens=1))
    async with taken_up(folder, tmp_path, max_inflight_requests=16) as frontend:
        call = frontend.inference.Generate(message, metadata=tuple(shows("small").items()))
        waiting = asyncio.create_task(call.read())
        refused = await complete(frontend, "large")
        assert refused.status_code == 429
    assert await waiting


async def test_keys_of_one_tenant_share_the_whole_limit(folder: Path, tmp_path: Path) -> None:
    keys = key_file(tmp_path, entry("one", tenant="t"), entry("two", tenant="t"))
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address, api_keys=keys, max_inflight_requests=4) as frontend:
        held = asyncio.create_task(complete(frontend, "one", prompt=["x"] * 3))
        await script.until(lambda: script.num_running == 3)
        last = asyncio.create_task(complete(frontend, "one"))
        await script.until(lambda: script.num_running == 4)
        refused = await complete(frontend, "two")
        assert (
            refused.json()["error"]["message"]
            == "max_inflight_requests: 4 in flight and 1 requested exceed the limit of 4; retry later"
        )
        script.resume()
        assert [(await call).status_code for call in (held, last)] == [200, 200]
