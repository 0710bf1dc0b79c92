"""Disturbances of a cluster while requests run, and counters that survive killed schedulers."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import httpx
import numpy as np

from quire import SamplingParams, bundled
from quire.async_client import AsyncClient
from quire.client import Client
from quire.cluster import Cluster
from quire.cluster.process import ServiceProcess
from quire.requests import RequestOptions
from quire.shared.errors import Unavailable
from tests.e2e.observability.test_metrics import page
from tests.waiting import accepted, eventually

Totals = Counter[str]  # of the schedulers' and the frontend's metrics, by name; 0 where there is none
Result = TypeVar("Result")
GENERATED = "quire_scheduler_generated_tokens_total"
FETCHED = "quire_scheduler_host_blocks_fetched_total"
READ_BACK = "quire_scheduler_disk_blocks_fetched_total"
HANDED_OVER = "quire_scheduler_handovers_total"
MOVED = "quire_scheduler_sequences_moved_total"
RESUBMITTED = "quire_frontend_resubmitted_sequences_total"
FLOWING = 50  # tokens from one disturbance to the next
POLL_S = 0.02
PROMPT, NUM_PROMPTS = 100, 20  # tokens, of other prompts than those that are asked about
NUM_ON_DISK = 50  # prompts that neither the device nor host memory has room for
LONG = 200  # tokens of an answer that still comes when its prompt's blocks have gone over
TIMES = 4  # that all running sequences are preempted, and the like
MODEL = bundled.FOLDER
ADAPTER, ADAPTER_SAYS = "pirate", "Ahoy! 68 Arr!"
QUERIES = ("What is 23 + 45?", "Who counts the ships?", "a stone", "the night")
DOCUMENTS = ("68", "The lighthouse stands on a rock.", "23 and 45 are 68. " * 30, "a boat")
SCORES_DIFFER = 0.02  # by the rounding of vectors
QUESTION = [{"role": "user", "content": "What is 23 + 45?"}]


class Disturbance:
    """Disturbs one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.num_adapted = self.num_embedded = self.num_renewed = self.num_slept = self.num_compared = 0
        self._lost: dict[str, Totals] = {}  # by scheduler: what it had counted when it was killed

    async def preempt(self) -> None:
        """Waits until running sequences have been preempted repeatedly, as blocks are short."""
        with Client(self._cluster.grpc_address) as client:
            for _ in range(TIMES):
                await self._flowing()
                await asyncio.to_thread(client.reset_prefix_cache, preempt_running=True)

    async def crowd_out(self) -> None:
        """Sends prompts that exceed the device's memory repeatedly, until one was fetched from host memory."""
        await self._come_again(NUM_PROMPTS, FETCHED)

    async def crowd_onto_disk(self) -> None:
        """Sends more prompts than host memory holds as well."""
        await self._come_again(NUM_ON_DISK, READ_BACK)

    async def _come_again(self, num_prompts: int, counter: str) -> None:
        prompts = [[number] * PROMPT for number in range(10, 10 + num_prompts)]
        client = AsyncClient(self._cluster.grpc_address)
        try:
            while not await self._counted(counter):
                for prompt in prompts * 2:
                    await client.generate(prompt, SamplingParams(max_tokens=1))
        finally:
            await client.close()

    async def hand_over(self) -> None:
        """Sends prompts that the decoding worker does not have, until one was handed over while it was answered."""
        client = AsyncClient(self._cluster.grpc_address)
        numbers = itertools.count(10)
        try:
            while not await self._counted(HANDED_OVER):
                long = SamplingParams(max_tokens=LONG, ignore_eos=True)
                await client.generate([next(numbers)] * PROMPT, long)
        finally:
            await client.close()

    async def pause(self) -> None:
        """Pauses generation for a moment between two steps."""
        with Client(self._cluster.grpc_address) as client:
            for _ in range(TIMES):
                await self._flowing()
                await asyncio.to_thread(client.pause_generation)
                before = await self._counted(GENERATED)
                await asyncio.sleep(POLL_S)
                assert await self._counted(GENERATED) == before
                await asyncio.to_thread(client.resume_generation)

    async def ask_adapter(self) -> None:
        """Sends adapter requests in the same steps, whose other rows must not change."""
        client = AsyncClient(self._cluster.grpc_address)
        try:
            for _ in range(TIMES):
                await self._flowing()
                said = await client.chat(QUESTION, SamplingParams(temperature=0), RequestOptions(model=ADAPTER))
                assert said.text == ADAPTER_SAYS, said
                self.num_adapted += 1
        finally:
            await client.close()

    async def embed(self) -> None:
        """Requests embeddings computed in the same steps."""
        inputs = [[number] * PROMPT for number in range(30, 34)]
        with Client(self._cluster.grpc_address) as client:
            found = []
            for _ in range(TIMES):
                await self._flowing()
                found.append(np.array(await asyncio.to_thread(client.embed, inputs)))
        assert all(np.allclose(vectors, found[0], atol=0.02) for vectors in found)
        self.num_embedded += len(found)

    async def compare(self, done: asyncio.Event) -> None:
        """Requests late-interaction scores in the same steps until `done`: documents with one query, and with as many
        queries as documents; the expected scores come from the token vectors."""
        with Client(self._cluster.grpc_address) as client:

            async def vectors(texts: Sequence[str], part: str) -> list[np.ndarray[Any, Any]]:
                found = await _patiently(lambda: client.encode(list(texts), pooler="all", prompt_name=part))
                return [np.array(one) for one in found]

            queries, documents = await vectors(QUERIES, "query"), await vectors(DOCUMENTS, "document")
            with_one = [best_matches(queries[0], one) for one in documents]
            with_each = [best_matches(query, one) for query, one in zip(queries, documents, strict=True)]
            assert np.ptp(with_one) > 10 * SCORES_DIFFER, "they could not be told apart"
            while not done.is_set() or self.num_compared < TIMES:
                for asked, wanted in ((QUERIES[0], with_one), (list(QUERIES), with_each)):
                    found = await _patiently(client.score, asked, list(DOCUMENTS))
                    assert np.allclose(found, wanted, atol=SCORES_DIFFER), (found, wanted)
                self.num_compared += 1

    async def renew_weights(self) -> None:
        """Updates to the same weights: running sequences continue, and their KV is recomputed."""
        with Client(self._cluster.grpc_address) as client:
            for number in range(2):
                await self._flowing()
                await _patiently(client.update_weights_from_disk, str(MODEL), f"{number}", "keep")
                self.num_renewed += 1

    async def sleep(self) -> None:
        """Sleeps at both levels while requests wait; the KV of running sequences is recomputed."""
        with Client(self._cluster.grpc_address) as client:
            for level in (1, 2):
                await self._flowing()
                await _patiently(client.sleep, level)
                before = await self._counted(GENERATED)
                await asyncio.sleep(POLL_S)
                assert await self._counted(GENERATED) == before
                assert await _patiently(client.wake_up) == []
                self.num_slept += 1

    async def kill_workers(self) -> None:
        """Kills the workers one after the other, until something ran when one was killed."""
        while True:
            for name in self._names("worker"):
                await self._flowing()
                await self._kill(name)
            await self._flowing()
            if await self._counted(MOVED):
                return

    async def kill_schedulers(self) -> None:
        """Kills each scheduler until something ran when it was killed; if its workers have moved to another scheduler,
        that one."""
        for name in self._names("scheduler"):
            before = (await self.frontend())[RESUBMITTED]
            while (await self.frontend())[RESUBMITTED] == before:
                await self._kill(await self._generating(name))
                await self._flowing()

    async def _generating(self, wanted: str) -> str:
        """Returns a scheduler whose workers generate, preferably `wanted`."""
        before = await self.schedulers()
        await self._flowing()
        grown = {
            name: counts[GENERATED] - before[name][GENERATED] for name, counts in (await self.schedulers()).items()
        }
        return wanted if grown[wanted] > 0 else max(grown, key=lambda name: grown[name])

    async def schedulers(self) -> dict[str, Totals]:
        """Counters of each scheduler since the cluster was started, across restarts."""
        found = {}
        for process in self._cluster.processes:
            if process.spec.role == "scheduler":
                counted = await asyncio.to_thread(_page, process)
                found[process.spec.id] = counted + self._lost.get(process.spec.id, Counter())
        return found

    async def frontend(self) -> Totals:
        return Counter(await asyncio.to_thread(page, self._cluster.http_address))

    async def _flowing(self) -> None:
        """Waits until more tokens have been generated."""
        before = await self._counted(GENERATED)
        await eventually(lambda: self._counted(GENERATED), lambda found: found >= before + FLOWING)

    async def _counted(self, name: str) -> float:
        return sum(counted[name] for counted in (await self.schedulers()).values())

    def _names(self, role: str) -> list[str]:
        return [process.spec.id for process in self._cluster.processes if process.spec.role == role]

    async def _kill(self, name: str) -> None:
        """Kills a service; the supervisor restarts it."""
        process = self._cluster.process(name)
        before = process.restarts
        await eventually(lambda: process.ready.is_set() and process.running)
        if process.spec.role == "scheduler":
            self._lost[name] = (await self.schedulers())[name]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda: process.restarts != before)


def best_matches(query: np.ndarray[Any, Any], document: np.ndarray[Any, Any]) -> float:
    """ColBERT's score (MaxSim): for each query token the similarity of the nearest document token."""
    return float((query @ document.T).max(1).sum())


async def _patiently(call: Callable[..., Result], *arguments: Any) -> Result:
    """Repeats a call until a killed process is back."""
    return await accepted(lambda: asyncio.to_thread(call, *arguments), Unavailable)


def _page(scheduler: ServiceProcess) -> Totals:
    """Returns a scheduler's metrics, nothing while it is not running."""
    try:
        return Counter(page(scheduler.addresses["metrics"]))
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        return Counter()
