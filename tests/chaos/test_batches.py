"""A frontend that is killed with batches and uploads in progress, which were sent over gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from quire.async_client import AsyncClient
from quire.cluster import Cluster
from quire.shared.pb.batch.v1 import batch_pb2 as pb
from quire.shared.pb.batch.v1 import batch_pb2_grpc
from quire.shared.rpc.channel import connect
from tests.chaos.conftest import FRONTEND, SCHEDULER, WORKER, leaves_nothing_behind
from tests.chaos.extra_frontend import extra_frontend
from tests.chaos.streams import prompts
from tests.e2e.conftest import running_cluster
from tests.waiting import eventually

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

NUM_LINES = 32
LINE_TOKENS = 200  # of an answer: the lines behind the first ones take seconds
ENDPOINT = "/v1/completions"


def lines() -> list[dict[str, object]]:
    texts = prompts()
    bodies = (
        {"prompt": texts[number % len(texts)], "temperature": 0, "max_tokens": LINE_TOKENS, "ignore_eos": True}
        for number in range(NUM_LINES)
    )
    return [{"custom_id": f"q{n}", "method": "POST", "url": ENDPOINT, "body": body} for n, body in enumerate(bodies)]


def texts_of(content: bytes) -> dict[str, str]:
    answers = map(json.loads, content.splitlines())
    return {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers}


async def half_an_upload() -> AsyncIterator[pb.UploadFileRequest]:
    yield pb.UploadFileRequest(begin=pb.NewFile(purpose="batch", bytes=4_000_000))
    for _ in range(40):
        yield pb.UploadFileRequest(content=b"x" * 50_000)
    await asyncio.Event().wait()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        await eventually(holds)


async def test_batch_of_a_killed_frontend_continues_at_another(tmp_path: Path) -> None:
    """Every line is answered once, with the output of an undisturbed batch; half an upload is discarded."""
    with running_cluster(redis="embedded", worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        batch_id = await _killed_in_the_middle(cluster, tmp_path)
        async with extra_frontend(cluster, "heir", batch_folder=tmp_path) as heir, AsyncClient(heir.grpc) as client:
            ended = await client.batches.wait(batch_id, 120)
            told = texts_of(await client.files.content(ended.output_file_id))
            again = await client.batches.wait((await client.batches.create(ended.input_file_id, ENDPOINT)).id, 120)
            undisturbed = texts_of(await client.files.content(again.output_file_id))
            listed = (await client.files.list("batch")).files
        assert (ended.status, ended.completed, ended.failed) == (pb.BATCH_STATUS_COMPLETED, NUM_LINES, 0)
        assert told == undisturbed
        assert [file.id for file in listed] == [ended.input_file_id]
        await asyncio.to_thread(leaves_nothing_behind, cluster)


async def _killed_in_the_middle(cluster: Cluster, folder: Path) -> str:
    """Kills the frontend in the middle of a batch; returns the batch's id."""
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines())
    settings = {"batch_folder": folder, "batch_concurrency": 2}
    async with extra_frontend(cluster, "doomed", **settings) as doomed, AsyncClient(doomed.grpc) as client:
        channel = connect(doomed.grpc)
        upload = batch_pb2_grpc.FileServiceStub(channel).UploadFile(half_an_upload())
        await until(lambda: any(path.stat().st_size >= 2**20 for path in folder.glob("files/*.part")))
        batch = await client.batches.create((await client.files.create(content)).id, ENDPOINT)
        answers = folder / "batches" / f"{batch.id}.output"
        await until(lambda: answers.exists() and answers.read_bytes().count(b"\n") >= NUM_LINES // 4)
        os.kill(doomed.process, signal.SIGKILL)
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await upload
        await channel.close()
    assert broken.value.code() == grpc.StatusCode.UNAVAILABLE
    assert answers.read_bytes().count(b"\n") < NUM_LINES, "it was in the middle"
    return batch.id
