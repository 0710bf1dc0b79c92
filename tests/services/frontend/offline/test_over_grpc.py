"""Tests of files and batches over gRPC with the Python clients: same store and same answers as over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncClient, Client
from quire.clients.refused_streams import await_answer
from quire.services.frontend.composition.timing import FrontendTiming
from quire.shared.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unauthenticated,
    Unimplemented,
)
from quire.shared.pb.batch.v1 import batch_pb2 as pb
from quire.shared.pb.batch.v1 import batch_pb2_grpc
from tests.services.frontend.offline.test_batches import CHAT, line, serving, written
from tests.services.frontend.running import Running
from tests.services.frontend.tool_model import tool_model_folder, tool_server
from tests.waiting import accepted, eventually

BATCH_ID, FILE_ID = f"batch_{'0' * 32}", f"file-{'0' * 32}"


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


OFTEN = FrontendTiming(batch_poll_s=0.02)


def read(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(one) for one in content.splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "files").iterdir())


def run_batch(address: str, path: Path) -> tuple[pb.Batch, bytes, bytes, list[str]]:
    """Runs a batch from upload to deletion with the blocking client."""
    with Client(address) as client:
        file = client.files.create(path)
        assert (file.filename, file.purpose, file.bytes) == ("in.jsonl", "batch", path.stat().st_size)
        assert client.files.retrieve(file.id) == file
        created = client.batches.create(file.id, CHAT, {"run": "1"})
        assert created.status == pb.BATCH_STATUS_VALIDATING
        batch = client.batches.wait(created.id, 60)
        found = [client.files.content(file_id) for file_id in (batch.output_file_id, batch.error_file_id)]
        return batch, *found, [one.id for one in client.batches.list().batches]


async def test_a_batch_over_grpc_is_the_batch_over_http(tool_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(written(line(1), line(2, temperature=9), line(3, max_tokens=2)))
    async with serving(tool_model, tmp_path, timing=OFTEN) as (frontend, openai, _script):
        batch, good, bad, listed = await asyncio.to_thread(run_batch, frontend.frontend.grpc_address, path)
        over_http = await openai.batches.retrieve(batch.id)
        content = (await openai.files.content(batch.output_file_id)).content
    assert (batch.status, batch.total, batch.completed, batch.failed) == (pb.BATCH_STATUS_COMPLETED, 3, 2, 1)
    assert (dict(batch.metadata), listed) == ({"run": "1"}, [batch.id])
    assert content == good
    assert (over_http.output_file_id, over_http.created_at) == (batch.output_file_id, batch.created_at)
    assert over_http.completed_at == batch.moments["completed_at"]
    assert {one["custom_id"]: one["response"]["status_code"] for one in read(good)} == {"q1": 200, "q3": 200}
    assert [one["custom_id"] for one in read(bad)] == ["q2"]


async def test_the_asynchronous_client_works_and_lists_by_pages(tool_model: Path, tmp_path: Path) -> None:
    content = written(line(1), line(1), line(2))
    async with (
        serving(tool_model, tmp_path, timing=OFTEN) as (frontend, _, _script),
        AsyncClient(frontend.frontend.grpc_address) as client,
    ):
        files = [await client.files.create(content, filename=f"{number}.jsonl") for number in range(3)]
        batch = await client.batches.wait((await client.batches.create(files[0].id, CHAT)).id, 60)
        first = await client.files.list(limit=2)
        second = await client.files.list(after=first.files[-1].id, limit=2)
        assert (await client.batches.list()).batches == [batch]
        assert await client.files.content(files[1].id) == content
        assert b"".join([piece async for piece in client.files.pieces(files[1].id, 7)]) == content[7:]
        assert [piece async for piece in client.files.pieces(files[1].id, len(content))] == []
        for file in files:
            await client.files.delete(file.id)
        assert (await client.files.list()).files == []
    assert [*first.files, *second.files] == sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)
    assert (first.has_more, second.has_more) == (True, False)
    assert batch.status == pb.BATCH_STATUS_FAILED
    assert [(error.line, error.param) for error in batch.errors] == [(2, "custom_id")]


async def test_files_of_many_pieces_are_stored_unchanged(tool_model: Path, tmp_path: Path) -> None:
    content = bytes(range(256)) * 6000 + b"end"
    async with serving(tool_model, tmp_path, timing=OFTEN) as (frontend, _, _script):
        async with AsyncClient(frontend.frontend.grpc_address) as client:
            file = await client.files.create(content, "user_data")
            empty = await client.files.create(b"", "user_data", "empty")
            pieces = [piece async for piece in client.files.pieces(file.id)]
            assert await client.files.content(empty.id) == b""
        assert len(pieces) > 1
        assert b"".join(pieces) == content
        assert names(tmp_path) == [".bytes", ".bytes", ".json", ".json"]


Refused = Callable[[AsyncClient], Awaitable[Any]]


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (
            lambda client: client.files.create(b"x" * (2**20 + 1)),
            InvalidArgument,
            "bytes: a file may have at most 1048576",
        ),
        (lambda client: client.files.create(b"x", "nothing"), InvalidArgument, "purpose must be one of"),
        (lambda client: client.files.create("/nowhere/at/all"), InvalidArgument, "cannot read '/nowhere/at/all'"),
        (lambda client: client.files.list(limit=10_001), InvalidArgument, "limit must be in 1 to 10000, got 10001"),
        (lambda client: client.files.retrieve(FILE_ID), NotFound, f"No such file: '{FILE_ID}'"),
        (lambda client: client.files.content("../../etc/passwd"), NotFound, "No such file: '../../etc/passwd'"),
        (lambda client: client.files.delete(""), NotFound, "No such file: ''"),
        (lambda client: client.batches.retrieve(BATCH_ID), NotFound, f"No such batch: '{BATCH_ID}'"),
        (lambda client: client.batches.cancel("x"), NotFound, "No such batch: 'x'"),
        (lambda client: client.batches.create(FILE_ID, CHAT), InvalidArgument, "No such file"),
        (lambda client: client.batches.create(FILE_ID, "/v1/no"), InvalidArgument, "endpoint must be one of"),
        (lambda client: client.batches.create(FILE_ID, CHAT, {"a": "b" * 513}), InvalidArgument, "metadata: 'a': "),
        (
            lambda client: client.batches.create(FILE_ID, CHAT, {str(n): "" for n in range(17)}),
            InvalidArgument,
            "metadata has 17 entries; at most 16 are accepted",
        ),
    ],
)
async def test_errors_name_the_field(
    tool_model: Path, tmp_path: Path, ask: Refused, error: type[QuireError], said: str
) -> None:
    async with serving(tool_model, tmp_path, batch_file_mb=1) as (frontend, _, _script):
        async with AsyncClient(frontend.frontend.grpc_address) as client:
            with pytest.raises(error) as found:
                await ask(client)
        assert said in str(found.value)
        await until_nothing(tmp_path)


def begin(num_bytes: int) -> pb.UploadFileRequest:
    return pb.UploadFileRequest(begin=pb.NewFile(purpose="batch", bytes=num_bytes))


def piece(content: bytes) -> pb.UploadFileRequest:
    return pb.UploadFileRequest(content=content)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "begin: the first message must describe"),
        ([piece(b"x")], "begin: the first message must describe"),
        ([begin(3), piece(b"ab")], "bytes: 3 were announced, 2 received"),
        ([begin(3), piece(b"ab"), piece(b"cd"), piece(b"ef")], "bytes: 3 were announced, more than 3 received"),
        ([begin(3), begin(3)], "content: every message after the first must have content"),
        ([begin(2**21), piece(b"x" * (2**20 + 1))], "content: a piece may have at most 1048576 bytes, got 1048577"),
    ],
)
async def test_a_malformed_upload_is_refused_and_leaves_no_file(
    tool_model: Path, tmp_path: Path, messages: list[pb.UploadFileRequest], said: str
) -> None:
    async with serving(tool_model, tmp_path, timing=OFTEN) as (frontend, _, _script):
        stub = batch_pb2_grpc.FileServiceStub(frontend.channel)
        call = stub.UploadFile(iter(messages))
        with pytest.raises(QuireError, match=said):
            await await_answer(call)
        assert call.done()
        await until_nothing(tmp_path)


async def until_nothing(folder: Path) -> None:
    await eventually(lambda: not names(folder))


async def half_an_upload(silent: asyncio.Event) -> AsyncIterator[pb.UploadFileRequest]:
    yield begin(2**20)
    for _ in range(17):
        yield piece(b"x" * 50_000)
    await silent.wait()


async def test_a_stalled_upload_releases_its_space(tool_model: Path, tmp_path: Path) -> None:
    silent, timing = asyncio.Event(), FrontendTiming(stalled_upload_s=0.3)
    async with serving(tool_model, tmp_path, batch_file_mb=1, batch_store_mb=1, timing=timing) as (frontend, _, _):
        stub = batch_pb2_grpc.FileServiceStub(frontend.channel)
        with pytest.raises(QuireError, match=r"no data was received for 0\.3 s"):
            await await_answer(stub.UploadFile(half_an_upload(silent)))
        await until_nothing(tmp_path)


async def test_a_disconnected_upload_releases_its_space(tool_model: Path, tmp_path: Path) -> None:
    silent = asyncio.Event()
    async with serving(tool_model, tmp_path, batch_file_mb=1, batch_store_mb=1) as (frontend, _, _script):
        stub = batch_pb2_grpc.FileServiceStub(frontend.channel)
        call = stub.UploadFile(half_an_upload(silent))
        async with AsyncClient(frontend.frontend.grpc_address) as client:
            async with asyncio.timeout(60):
                while True:
                    try:
                        await client.files.delete((await client.files.create(b"x" * 2**19)).id)
                    except ResourceExhausted:  # the answer needs free space
                        break
                    if call.done():  # it arrived while the other file existed, and found no free space
                        call = stub.UploadFile(half_an_upload(silent))
            call.cancel()
            kept = await accepted(lambda: client.files.create(b"x" * 2**19), ResourceExhausted)
            assert (await client.files.list()).files == [kept]


async def test_files_of_a_key_are_invisible_to_others(tool_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": name, "key": f"sk-{name}"} for name in ("a", "b")]}))
    keys.chmod(0o600)
    async with serving(tool_model, tmp_path / "work", timing=OFTEN, api_keys=str(keys)) as (frontend, _, script):
        address = frontend.frontend.grpc_address
        async with (
            AsyncClient(address, api_key="sk-a") as a,
            AsyncClient(address, api_key="sk-b") as b,
            AsyncClient(address, api_key="sk-x") as stranger,
        ):
            file = await a.files.create(written(line(1)))
            batch = await a.batches.wait((await a.batches.create(file.id, CHAT)).id, 60)
            assert (batch.status, script.submissions[0].tenant) == (pb.BATCH_STATUS_COMPLETED, "a")
            for ask in (
                b.files.retrieve(file.id),
                b.files.for_tenant("a").retrieve(file.id),
                b.files.content(batch.output_file_id),
                b.files.delete(file.id),
                b.batches.retrieve(batch.id),
                b.batches.cancel(batch.id),
            ):
                with pytest.raises(NotFound):
                    await ask
            assert ((await b.files.list()).files, (await b.batches.list()).batches) == ([], [])
            for ask in (stranger.files.list(), stranger.files.create(b"x"), stranger.batches.list()):
                with pytest.raises(Unauthenticated):
                    await ask
            assert {one.id for one in (await a.files.list()).files} == {file.id, batch.output_file_id}


async def test_without_keys_callers_name_the_tenant(tool_model: Path, tmp_path: Path) -> None:
    async with serving(tool_model, tmp_path, timing=OFTEN) as (frontend, _, script):
        async with AsyncClient(frontend.frontend.grpc_address) as client:
            file = await client.files.for_tenant("blue").create(written(line(1)))
            with pytest.raises(NotFound):
                await client.files.retrieve(file.id)
            blue = client.batches.for_tenant("blue")
            assert (await blue.wait((await blue.create(file.id, CHAT)).id, 60)).completed == 1
        listed = await frontend.http.get("/v1/files", headers={"x-tenant": "blue"})
    assert script.submissions[0].tenant == "blue"
    assert file.id in {one["id"] for one in listed.json()["data"]}


async def test_a_cancelled_batch_keeps_what_was_answered(tool_model: Path, tmp_path: Path) -> None:
    async with (
        serving(tool_model, tmp_path, timing=OFTEN, batch_concurrency=2) as (frontend, _, script),
        AsyncClient(frontend.frontend.grpc_address) as client,
    ):
        file = await client.files.create(written(*(line(number) for number in range(1, 201))))
        batch = await client.batches.create(file.id, CHAT)
        await script.until(lambda: len(script.submissions) >= 5)
        with pytest.raises(DeadlineExceeded, match=batch.id):
            await client.batches.wait(batch.id, 0)
        assert (await client.batches.cancel(batch.id)).status == pb.BATCH_STATUS_CANCELLING
        ended = await client.batches.wait(batch.id, 60)
        told = read(await client.files.content(ended.output_file_id))
    assert ended.status == pb.BATCH_STATUS_CANCELLED
    assert 0 < len(told) == ended.completed < 200


async def test_without_a_folder_there_are_none(tool_model: Path) -> None:
    async with (
        tool_server(tool_model, "no") as (frontend, _, _script),
        AsyncClient(frontend.frontend.grpc_address) as client,
    ):
        for ask in (client.files.create(b"x"), client.files.list(), client.batches.list()):
            with pytest.raises(Unimplemented, match="--batch-folder"):
                await ask


async def test_calls_are_counted_by_their_methods(tool_model: Path, tmp_path: Path) -> None:
    async with serving(tool_model, tmp_path, timing=OFTEN) as (frontend, _, _script):
        async with AsyncClient(frontend.frontend.grpc_address) as client:
            file = await client.files.create(b"x")
            await client.files.content(file.id)
            with pytest.raises(NotFound):
                await client.batches.retrieve(BATCH_ID)
        counted = metrics_of(frontend)
    assert counted[("UploadFile", "OK")] == counted[("DownloadFile", "OK")] == counted[("GetBatch", "NOT_FOUND")] == 1


def metrics_of(frontend: Running) -> dict[tuple[str, str], float]:
    counter = frontend.frontend.metrics.grpc_requests
    return {
        (sample.labels["method"], sample.labels["code"]): sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


async def test_an_unreadable_file_is_an_error_before_anything_is_sent(tool_model: Path, tmp_path: Path) -> None:
    """Checks an unreadable file: otherwise gRPC would cancel the call, and its caller with it."""
    async with serving(tool_model, tmp_path, timing=OFTEN) as (frontend, _, _script):
        client = AsyncClient(frontend.frontend.grpc_address)
        with pytest.raises(InvalidArgument, match=r"file: cannot read .* Is a directory"):
            await client.files.create(tmp_path)
        await client.close()
