"""Frontends that are killed while streaming, and clients that resume their streams at another frontend."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from quire.async_client import AsyncClient
from quire.cluster import Cluster
from quire.outputs import Delta
from quire.params import SamplingParams
from quire.requests import RequestOptions
from tests.chaos.conftest import FRONTEND, SCHEDULER, WORKER, leaves_nothing_behind
from tests.chaos.extra_frontend import extra_frontend
from tests.chaos.streams import prompts
from tests.e2e.conftest import running_cluster
from tests.waiting import eventually

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

NUM_STREAMS = 6
# Lengths of answers, which take seconds: a frontend killed at their first tokens is still generating.
GREEDY_TOKENS, SEEDED_TOKENS, BACKGROUND_TOKENS = 1000, 400, 1500


def greedy(_index: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)


def seeded(index: int) -> SamplingParams:
    """Parameters of two samples with log-probabilities."""
    drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 1000 + index}
    return SamplingParams(n=2, **drawn, logprobs=2, max_tokens=SEEDED_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def with_redis() -> Iterator[Cluster]:
    with running_cluster(redis="embedded", worker=WORKER, scheduler=SCHEDULER, frontend=FRONTEND) as cluster:
        yield cluster


@dataclass
class Reader:
    """One stream as read, at any frontend."""

    prompt: str
    params: SamplingParams
    options: RequestOptions
    deltas: list[Delta] = field(default_factory=list)
    broke: bool = False

    async def begin(self, client: AsyncClient) -> None:
        """Reads until the frontend dies."""
        try:
            async for delta in client.stream(self.prompt, self.params, self.options):
                self.deltas.append(delta)
        except Exception:
            self.broke = True

    async def go_on(self, client: AsyncClient) -> None:
        async for delta in client.attach(self.options.request_id, len(self.deltas)):
            self.deltas.append(delta)

    @property
    def said(self) -> dict[int, tuple[str, list[int], list[str]]]:
        """Text, tokens and finish reason of each sample."""
        return {
            sample: (
                "".join(delta.text for delta in own),
                [token for delta in own for token in delta.token_ids],
                [delta.finish_reason for delta in own if delta.finish_reason],
            )
            for sample in {delta.index for delta in self.deltas}
            if (own := [delta for delta in self.deltas if delta.index == sample])
        }


@pytest.mark.parametrize("kind", [greedy, seeded])
async def test_streams_of_a_killed_frontend_resume_at_another(
    with_redis: Cluster, kind: Callable[[int], SamplingParams]
) -> None:
    """Every token arrives exactly once, also for readers that resume later."""
    options = [RequestOptions(request_id=f"{kind.__name__}-{i}", resumable=True) for i in range(NUM_STREAMS)]
    readers = [Reader(prompt, kind(i), options[i]) for i, prompt in enumerate(prompts()[:NUM_STREAMS])]
    async with extra_frontend(with_redis) as other:
        doomed = AsyncClient(other.grpc)
        begun = [asyncio.create_task(reader.begin(doomed)) for reader in readers]
        async with asyncio.timeout(120):
            await eventually(lambda: all((len(reader.deltas) > i for i, reader in enumerate(readers))))
        os.kill(other.process, signal.SIGKILL)
        await asyncio.gather(*begun)
        await doomed.close()
    assert sum(reader.broke for reader in readers) >= NUM_STREAMS // 2, "they were in the middle"
    client = AsyncClient(with_redis.grpc_address)
    await asyncio.gather(*(reader.go_on(client) for reader in readers))
    later = [replace(reader, deltas=[]) for reader in readers]
    await asyncio.gather(*(reader.go_on(client) for reader in later))
    undisturbed = [Reader(reader.prompt, reader.params, RequestOptions()) for reader in readers]
    await asyncio.gather(*(reader.begin(client) for reader in undisturbed))
    await client.close()
    for reader, again, whole in zip(readers, later, undisturbed, strict=True):
        assert [delta.offset for delta in reader.deltas] == list(range(len(reader.deltas)))
        assert again.deltas == reader.deltas
        assert reader.said == whole.said
    await asyncio.to_thread(leaves_nothing_behind, with_redis)


async def ended(http: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    """Polls until the response has ended."""

    async def ask() -> dict[str, Any]:
        found: dict[str, Any] = (await http.get(f"/v1/responses/{response_id}")).json()
        return found

    return await eventually(ask, lambda found: found["status"] not in ("queued", "in_progress"), 120)


async def test_background_responses_of_a_killed_frontend_continue_at_another(with_redis: Cluster) -> None:
    """Polling continues responses that were never streamed."""
    bodies = [
        {"input": prompt, "temperature": 0, "max_output_tokens": BACKGROUND_TOKENS, "ignore_eos": True}
        for prompt in prompts()[:NUM_STREAMS]
    ]
    async with httpx.AsyncClient(base_url=f"http://{with_redis.http_address}", timeout=120) as http:
        async with extra_frontend(with_redis) as other:
            async with httpx.AsyncClient(base_url=f"http://{other.http}", timeout=120) as doomed:
                asked = [doomed.post("/v1/responses", json={**body, "background": True}) for body in bodies]
                begun = [answer.json() for answer in await asyncio.gather(*asked)]
            os.kill(other.process, signal.SIGKILL)
        assert {response["status"] for response in begun} == {"queued"}
        unfinished = [(await http.get(f"/v1/responses/{one['id']}")).json()["status"] for one in begun]
        assert set(unfinished) & {"queued", "in_progress"}, "they were in the middle"
        found = await asyncio.gather(*(ended(http, response["id"]) for response in begun))
        whole = await asyncio.gather(*(http.post("/v1/responses", json=body) for body in bodies))
    for response, undisturbed in zip(found, whole, strict=True):
        assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", BACKGROUND_TOKENS)
        texts = [one["output"][0]["content"][0]["text"] for one in (response, undisturbed.json())]
        assert texts[0] == texts[1]
    await asyncio.to_thread(leaves_nothing_behind, with_redis)
