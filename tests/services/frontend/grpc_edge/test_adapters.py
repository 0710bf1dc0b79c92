"""Operators load and unload adapters through a frontend, over gRPC and HTTP, at all schedulers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.inference.v1 import inference_pb2
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

KEY = "operators-key-0123456789-0123456789"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "a", "lora_path": "somewhere"}


@asynccontextmanager
async def serving(
    folder: Path, count: int = 1, **settings: Any
) -> AsyncIterator[tuple[Running, list[ScriptedScheduler]]]:
    async with AsyncExitStack() as stack:
        scripts = [ScriptedScheduler(count_up) for _ in range(count)]
        for script in scripts:
            await stack.enter_async_context(scheduler(script))
        frontend = await stack.enter_async_context(running(folder, *(script.address for script in scripts), **settings))
        await frontend.until_sessions(count)
        yield frontend, scripts


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    return str(path)


async def post(frontend: Running, path: str, body: Any = None, key: str = KEY) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await frontend.http.post(path, json=BODY if body is None else body, headers=headers)


async def models(frontend: Running) -> list[str]:
    found = await frontend.inference.ListModels(inference_pb2.ListModelsRequest())
    return [model.name for model in found.models][1:]


async def test_over_grpc_its_own_requests_go_by_it_at_once(folder: Path) -> None:
    async with serving(folder, 2) as (frontend, scripts):
        loaded = await frontend.admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name="a", path="x"))
        assert (loaded.num_workers, loaded.digest) == (4, b"d" * 32)
        assert await models(frontend) == ["a"]
        request = inference_pb2.GenerateRequest(text="x", model="a")
        assert [message async for message in frontend.inference.Generate(request)]
        (heard,) = [submission for script in scripts for submission in script.submissions]
        assert (heard.adapter, heard.adapter_digest) == ("a", b"d" * 32)
        assert (heard.params.adapter, heard.params.adapter_digest) == ("a", b"d" * 32)
        (one,) = (await frontend.admin.ListAdapters(admin_pb2.ListAdaptersRequest())).adapters
        assert (one.name, one.num_workers, one.num_sequences) == ("a", 4, 2)
        unloaded = await frontend.admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="a"))
        assert unloaded.num_sequences == 6
        assert await models(frontend) == []


async def test_what_one_scheduler_refuses_the_others_give_back(folder: Path) -> None:
    async with serving(folder, 2) as (frontend, scripts):
        scripts[1].adapter_refusal = (grpc.StatusCode.INVALID_ARGUMENT, "w: no such folder")
        with pytest.raises(grpc.aio.AioRpcError, match="w: no such folder") as refused:
            await frontend.admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name="a", path="x"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert scripts[0].operated == ["load_adapter a", "unload_adapter a"]
        assert await models(frontend) == []


async def test_one_that_only_some_schedulers_have_is_unloaded_all_the_same(folder: Path) -> None:
    async with serving(folder, 2) as (frontend, scripts):
        scripts[0].set_view(adapter_digests=b"d" * 32)
        scripts[0].view.adapters.append("a")
        unloaded = await frontend.admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="a"))
        assert unloaded.num_sequences == 3
        with pytest.raises(grpc.aio.AioRpcError, match="no such adapter") as refused:
            await frontend.admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="a"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("settings", [{}, {"api_key": "clients-key"}])
async def test_over_http_with_operators_key(folder: Path, key_file: str, settings: dict[str, str]) -> None:
    async with serving(folder, admin_key_file=key_file, **settings) as (frontend, (script,)):
        loaded = await post(frontend, LOAD)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'a' added successfully.")
        unloaded = await post(frontend, UNLOAD, {"lora_name": "a", "lora_int_id": 1})
        assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'a' removed successfully.")
        missing = await post(frontend, UNLOAD, {"lora_name": "a"})
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")
        assert script.operated == ["load_adapter a", "unload_adapter a", "unload_adapter a"]


async def test_over_http_no_other_key_will_do(folder: Path, key_file: str) -> None:
    async with serving(folder, admin_key_file=key_file, api_key="clients-key") as (frontend, (script,)):
        for path in (LOAD, UNLOAD, LOAD + "/"):
            for key in ("", "clients-key", KEY[:-1]):
                reply = await post(frontend, path, key=key)
                assert (reply.status_code, reply.json()["error"]["type"]) == (401, "AuthenticationError"), (path, key)
        assert (await post(frontend, "/v1/completions", {"prompt": "x"})).status_code == 401, "it is for operators only"
        assert script.operated == []


async def test_without_a_configured_key_every_call_is_refused(folder: Path) -> None:
    async with serving(folder) as (frontend, (script,)):
        for key in ("", "x"):
            reply = await post(frontend, LOAD, key=key)
            assert reply.status_code == 401
            assert "admin_key_file" in reply.json()["error"]["message"]
        assert script.operated == []


async def test_bodies_that_are_wrong_are_refused_by_field(folder: Path, key_file: str) -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        (LOAD, {"lora_name": "a"}, "lora_path"),
        (LOAD, {"lora_path": "a"}, "lora_name"),
        (LOAD, BODY | {"inplace": True}, "inplace"),
        (LOAD, BODY | {"lora_name": 3}, "lora_name"),
        (UNLOAD, {}, "lora_name"),
    ]
    async with serving(folder, admin_key_file=key_file) as (frontend, (script,)):
        for path, body, word in wrong:
            reply = await post(frontend, path, body)
            assert (reply.status_code, word in reply.json()["error"]["message"]) == (400, True), body
        assert script.operated == []


async def test_a_full_worker_is_reported_as_full(folder: Path, key_file: str) -> None:
    async with serving(folder, admin_key_file=key_file) as (frontend, (script,)):
        script.adapter_refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "max_loras")
        reply = await post(frontend, LOAD)
        assert (reply.status_code, "max_loras" in reply.json()["error"]["message"]) == (429, True)
