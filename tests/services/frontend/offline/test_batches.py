"""Tests of files and batches with the unmodified openai package against a frontend."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.services.frontend.offline import runner
from quire.services.frontend.offline.batch import Batch
from quire.services.frontend.offline.batches import BatchStore
from quire.services.frontend.offline.files import FileStore
from quire.shared import batch_lines
from quire.shared.errors import ResourceExhausted
from tests.observing import calls_of
from tests.services.frontend.running import Running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler
from tests.services.frontend.tool_model import tool_model_folder, tool_server
from tests.waiting import eventually

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


def line(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Number {number}."}]
    return {"custom_id": f"q{number}", "method": "POST", "url": url, "body": {"messages": messages, **body}}


def written(*lines: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@asynccontextmanager
async def serving(model: Path, folder: Path, **settings: Any) -> AsyncIterator[tuple[Running, Any, ScriptedScheduler]]:
    settings = {"batch_folder": str(folder), **settings}
    async with tool_server(model, "It is sunny.", **settings) as (frontend, client, script):
        yield frontend, client, script


async def ended(client: Any, batch_id: str) -> Any:
    ends = ("completed", "failed", "cancelled", "expired")
    return await eventually(lambda: client.batches.retrieve(batch_id), lambda batch: batch.status in ends)


async def begun(client: Any, content: bytes, endpoint: str = CHAT) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"run": "1"}
    )


async def until_counted(frontend: Running, counts: dict[str, float]) -> None:
    """Waits for the non-zero counters of batches by status and requests by outcome.

    An end is counted after it was written, so that a client may read it earlier.
    """
    names = ("quire_frontend_batches_ended_total", "quire_frontend_batch_requests_total")
    found: dict[str, float] = {}
    async with asyncio.timeout(60):
        while found != counts:
            found = {name: n for name, n in (await frontend.metrics()).items() if name.startswith(names) and n}


async def answers(client: Any, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]


async def test_a_batch_answers_each_line_and_reports_the_failed_ones(tool_model: Path, tmp_path: Path) -> None:
    content = written(line(1), line(2, temperature=9), line(3, max_tokens=2))
    async with serving(tool_model, tmp_path) as (frontend, client, _script):
        batch = await begun(client, content)
        assert batch.status == "validating"
        batch = await ended(client, batch.id)
        counts = {
            "quire_frontend_batches_ended_total{status=completed}": 1.0,
            "quire_frontend_batch_requests_total{outcome=completed}": 2.0,
            "quire_frontend_batch_requests_total{outcome=failed}": 1.0,
        }
        await until_counted(frontend, counts)
        good, bad = [await answers(client, file_id) for file_id in (batch.output_file_id, batch.error_file_id)]
        listed = [one.id async for one in client.batches.list()]
    assert (batch.status, batch.endpoint, batch.metadata) == ("completed", CHAT, {"run": "1"})
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    assert listed == [batch.id]
    by_id = {one["custom_id"]: one for one in good}
    assert by_id["q1"]["response"]["body"]["choices"][0]["message"]["content"] == "It is sunny."
    assert by_id["q3"]["response"]["body"]["usage"]["completion_tokens"] == 2
    assert by_id["q1"]["error"] is None
    (failed,) = bad
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("q2", 400)
    assert "temperature must be in" in failed["error"]["message"]


async def test_a_file_with_wrong_lines_fails_as_a_whole_and_names_them(tool_model: Path, tmp_path: Path) -> None:
    content = written(line(1), line(1), line(2, url="/v1/nowhere"), line(3, stream=True)) + b"{broken\n"
    async with serving(tool_model, tmp_path) as (frontend, client, script):
        batch = await ended(client, (await begun(client, content)).id)
        await until_counted(frontend, {"quire_frontend_batches_ended_total{status=failed}": 1})
    assert batch.status == "failed"
    assert [(error.line, error.param) for error in batch.errors.data] == [
        (2, "custom_id"),
        (3, "url"),
        (4, "body"),
        (5, None),
    ]
    assert not script.submissions


async def test_a_batch_resumes_where_a_frontend_left_it(tool_model: Path, tmp_path: Path) -> None:
    content = written(*(line(number) for number in range(1, 41)))
    async with serving(tool_model, tmp_path, batch_concurrency=4, drain_timeout_s=0.2) as (_, client, script):
        batch_id = (await begun(client, content)).id
        await script.until(lambda: len(script.submissions) >= 12)
        script.pause()
    so_far = (tmp_path / "batches" / f"{batch_id}.output").read_bytes()
    num_answered = so_far.count(b"\n")
    assert 0 < num_answered < 40
    (tmp_path / "batches" / f"{batch_id}.output").write_bytes(so_far + b'{"id": "batch_req_torn')
    async with serving(tool_model, tmp_path) as (_, client, script):
        batch = await ended(client, batch_id)
        lines = await answers(client, batch.output_file_id)
    assert sorted(one["custom_id"] for one in lines) == sorted(f"q{number}" for number in range(1, 41))
    assert len(script.submissions) == 40 - num_answered
    assert (batch.request_counts.total, batch.request_counts.completed) == (40, 40)


async def test_two_frontends_share_a_folder_and_answer_each_line_once(tool_model: Path, tmp_path: Path) -> None:
    content = written(*(line(number) for number in range(1, 31)))
    async with (
        serving(tool_model, tmp_path) as (_, client, script),
        serving(tool_model, tmp_path) as (_, other, other_script),
    ):
        batches = [await begun(client, content) for _ in range(3)]
        found = [await ended(other, batch.id) for batch in batches]
    assert {batch.status for batch in found} == {"completed"}
    assert len(script.submissions) + len(other_script.submissions) == 90


async def test_a_cancelled_batch_keeps_what_was_answered(tool_model: Path, tmp_path: Path) -> None:
    content = written(*(line(number) for number in range(1, 201)))
    async with serving(tool_model, tmp_path, batch_concurrency=2) as (_, client, script):
        batch_id = (await begun(client, content)).id
        await script.until(lambda: len(script.submissions) >= 5)
        assert (await client.batches.cancel(batch_id)).status == "cancelling"
        batch = await ended(client, batch_id)
        lines = await answers(client, batch.output_file_id)
    assert batch.status == "cancelled"
    assert 0 < len(lines) == batch.request_counts.completed < 200


async def test_lines_are_retried_while_the_server_is_full(tool_model: Path, tmp_path: Path) -> None:
    settings = {"max_inflight_requests": 2, "retry_after_ms": 1, "batch_concurrency": 8}
    async with serving(tool_model, tmp_path, **settings) as (_, client, _script):
        batch = await ended(client, (await begun(client, written(*map(line, range(1, 9))))).id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (8, 0)


async def test_files_belong_to_tenants(tool_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": name, "key": f"sk-{name}"} for name in ("a", "b")]}))
    keys.chmod(0o600)
    async with serving(tool_model, tmp_path / "batches", api_keys=str(keys)) as (frontend, _, script):
        a, b = (openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key=f"sk-{name}", max_retries=0) for name in "ab")
        async with a, b:
            batch = await ended(a, (await begun(a, written(line(1)))).id)
            assert (batch.status, script.submissions[0].tenant) == ("completed", "a")
            for call in (
                b.files.retrieve(batch.input_file_id),
                b.files.content(batch.output_file_id),
                b.files.delete(batch.input_file_id),
                b.batches.retrieve(batch.id),
                b.batches.cancel(batch.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
            with pytest.raises(openai.BadRequestError, match="No such file"):
                await b.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
            assert [one.id async for one in b.files.list()] == []
            assert (await a.files.delete(batch.input_file_id)).deleted
            assert [one.purpose async for one in a.files.list()] == ["batch_output"]


async def test_a_revoked_key_answers_no_more_lines(tool_model: Path, tmp_path: Path) -> None:
    async with serving(tool_model, tmp_path, api_key="old", batch_concurrency=1) as (frontend, client, script):
        client.api_key = "old"
        script.pause()
        batch_id = (await begun(client, written(line(1), line(2)))).id
        await script.until(lambda: script.submissions)
        sources = frontend.frontend.ingress.access.sources
        frontend.frontend.ingress.access.sources = ()
        script.resume()
        await eventually(
            lambda: json.loads((tmp_path / "batches" / f"{batch_id}.json").read_text())["status"] == "completed"
        )
        frontend.frontend.ingress.access.sources = sources
        batch = await ended(client, batch_id)
        (lines,) = await answers(client, batch.error_file_id)
    assert (lines["custom_id"], lines["response"]["status_code"]) == ("q2", 401)


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (b"--x\r\n", "multipart/form-data; boundary=x", "is incomplete"),
        (b"", "multipart/form-data; boundary=x", "empty"),
        (b"{}", "application/json", "content-type is 'application/json'"),
        (b"--x--\r\n", "multipart/form-data; boundary=x", "a part named `file`"),
        (
            b'--x\r\ncontent-disposition: form-data; name="file"; filename="../../etc/x"\r\n\r\nhi\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
            "purpose must be one of",
        ),
    ],
)
async def test_malformed_forms_are_refused(
    tool_model: Path, tmp_path: Path, content: bytes, kind: str, said: str
) -> None:
    async with serving(tool_model, tmp_path) as (frontend, _, _script):
        reply = await frontend.http.post("/v1/files", content=content, headers={"content-type": kind})
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]
    assert not list((tmp_path / "files").iterdir())


async def test_files_have_bounds(tool_model: Path, tmp_path: Path) -> None:
    async with serving(tool_model, tmp_path, batch_file_mb=1, batch_store_mb=1) as (_, client, _script):
        with pytest.raises(openai.APIStatusError) as found:
            await client.files.create(file=("big", b"x" * 2**20), purpose="batch")
        assert found.value.status_code == 413
        await client.files.create(file=("most", b"x" * (2**20 - 1000)), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="the file store is full"):
            await client.files.create(file=("a few", b"x" * 2000), purpose="batch")


async def test_without_a_folder_there_are_none(tool_model: Path) -> None:
    async with tool_server(tool_model, "no") as (frontend, client, _):
        with pytest.raises(openai.BadRequestError, match="--batch-folder"):
            await client.files.create(file=("x", b"x"), purpose="batch")
        assert (await frontend.http.get("/v1/batches")).status_code == 400


async def test_lines_are_validated_in_a_separate_process(tool_model: Path, tmp_path: Path) -> None:
    """Checks that lines are validated in a process: tens of thousands of JSON documents would block the loop for
    seconds."""
    async with serving(tool_model, tmp_path) as (_, client, _script):
        with calls_of(batch_lines.check_file) as checks:
            good = await begun(client, written(line(1), line(2)))
            bad = await begun(client, written(line(1), line(1)))
            assert (await ended(client, good.id)).status == "completed"
            assert (failed := await ended(client, bad.id)).status == "failed"
            assert "is also used in an earlier line" in failed.errors.data[0].message
    assert not checks


async def test_too_long_lines_are_reported_and_not_read_completely(tool_model: Path, tmp_path: Path) -> None:
    long = line(1, user="x" * batch_lines.MAX_LINE_BYTES)
    async with serving(tool_model, tmp_path) as (_, client, _script):
        batch = await ended(client, (await begun(client, written(long, line(2)))).id)
    assert batch.status == "failed"
    assert [(one.line, one.message) for one in batch.errors.data] == [(1, "line 1: it has more than 1048576 bytes")]
    lines = [*batch_lines.numbered_lines(io.BytesIO(written(long, line(2), long) + b"\n  \n" + written(line(3))[:-1]))]
    assert [number for number, _ in lines] == [1, 2, 3, 6]
    assert max(len(one) for _, one in lines) == batch_lines.MAX_LINE_BYTES + 1


def test_portions_are_of_some_lines_and_some_bytes() -> None:
    lines = [(number, b"x" * size) for number, size in enumerate((1, 1, 1, 1, 9, 1, 11, 5, 5, 1))]
    portions = [*runner.portions_of(iter(lines), max_lines=3, max_bytes=10)]
    assert [len(portion) for portion in portions] == [3, 2, 1, 1, 2, 1]
    assert [one for portion in portions for one in portion] == lines


class NotedStore(BatchStore):
    """Store that notes the ids of the batches that are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: list[str] = []

    def find(self, batch_id: str) -> Batch | None:
        self.read.append(batch_id)
        return super().find(batch_id)


def test_batches_that_have_ended_are_not_read_again(tmp_path: Path) -> None:
    """Checks that polling, which happens every second, does not read ended batches again."""
    store = NotedStore(tmp_path)
    ids = [store.create("", "", endpoint=CHAT, input_file_id="f", metadata=None).id for _ in range(3)]
    store.save(store.get(ids[0], "").with_status("completed", 1))
    assert {batch.id for batch in store.unfinished()} == {*ids[1:]}
    store.read.clear()
    assert {batch.id for batch in store.unfinished()} == {*ids[1:]} == {*store.read}
    with pytest.raises(ResourceExhausted):
        BatchStore(tmp_path, max_batches=3).create("", "", endpoint=CHAT, input_file_id="f", metadata=None)


def test_uploads_in_progress_count_as_used_space(tmp_path: Path) -> None:
    """Checks that uploads in progress are counted: concurrent ones would otherwise all find the same free space."""
    store = FileStore(tmp_path, 1000, 600)
    with store.reserve(600):
        store.check_space()
        with store.reserve(600), pytest.raises(ResourceExhausted):
            store.check_space()
        store.check_space()


def test_space_is_counted_while_files_are_deleted(tmp_path: Path) -> None:
    """Checks that temporary files may disappear between a listing and the look at each."""
    store = FileStore(tmp_path, 1 << 20, 600)

    def create_and_delete() -> None:
        for _ in range(3000):
            scratch = store.temp_path()
            scratch.touch()
            scratch.unlink()

    with ThreadPoolExecutor(2) as others:
        churning = [others.submit(create_and_delete) for _ in range(2)]
        while not all(one.done() for one in churning):
            store.check_space()
        for one in churning:
            one.result()


async def test_files_deleted_during_a_download_are_sent_completely(tool_model: Path, tmp_path: Path) -> None:
    """Checks also that a later request gets an error."""
    content = b"x" * 20_000_000
    async with serving(tool_model, tmp_path) as (frontend, client, _):
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        async with frontend.http.stream("GET", f"/v1/files/{file.id}/content") as answer:
            assert answer.headers["content-length"] == str(len(content))
            await client.files.delete(file.id)
            sent = await answer.aread()
        assert sent == content
        gone = await client.files.create(file=("in.jsonl", b"x"), purpose="batch")
        (tmp_path / "files" / f"{gone.id}.bytes").unlink()  # as if another client deleted it at this moment
        assert (await frontend.http.get(f"/v1/files/{gone.id}/content")).status_code == 404


async def test_ranges_of_a_file_are_served(tool_model: Path, tmp_path: Path) -> None:
    async with serving(tool_model, tmp_path) as (frontend, client, _):
        file = await client.files.create(file=("in.jsonl", b"0123456789"), purpose="batch")
        path = f"/v1/files/{file.id}/content"
        part = await frontend.http.get(path, headers={"range": "bytes=3-5"})
        beyond = await frontend.http.get(path, headers={"range": "bytes=10-"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"345", "bytes 3-5/10")
    assert beyond.status_code == 416


async def test_a_disk_error_is_reported_as_temporary(tool_model: Path, tmp_path: Path) -> None:
    """Checks that a disk error (full, read-only, or gone as here) is reported as temporary."""
    form = {"files": {"file": ("in.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    async with serving(tool_model, tmp_path) as (frontend, _, _script):
        (tmp_path / "files").rename(tmp_path / "away")
        refused = await frontend.http.post("/v1/files", **form)
        (tmp_path / "away").rename(tmp_path / "files")
        assert (await frontend.http.post("/v1/files", **form)).status_code == 200
    assert refused.status_code == 503
    assert "No such file or directory" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "10"
