"""`python -m tools.bench placement`: compares placement policies with conversations on simulated workers in real
time."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.async_client import AsyncClient
from quire.bench.measuring.percentiles import spread_ms
from quire.bench.report import Row, progress
from quire.client import Client
from quire.cluster import Cluster, ClusterOptions
from quire.flags.setting_flags import human_int
from quire.params import SamplingParams
from quire.shared.pb.admin.v1 import admin_pb2
from tools.bench.conversations import Conversation, conversations

POLICIES = ("prefix", "least_loaded", "round_robin")


@dataclass(slots=True)
class Tally:
    """Measurements of the clients."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the numbers of workers, the policies, and the simulated workers' properties."""
    parser.add_argument("--replicas", default="16,64", metavar="N,...", help="simulated workers (default: 16,64)")
    parser.add_argument("--policies", default=",".join(POLICIES), metavar="A,B,...", help="placements to compare")
    parser.add_argument("--per-replica", type=human_int, default=4, help="concurrent conversations per worker")
    parser.add_argument("--blocks", type=human_int, default=400, help="KV blocks of each worker")
    parser.add_argument("--step-ms", type=float, default=40.0, help="fixed time of a step, milliseconds")
    parser.add_argument("--answer", type=human_int, default=48, help="output tokens of a turn")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per number of workers and policy, with the same conversations for every policy."""
    for replicas in map(int, arguments.replicas.split(",")):
        talk = conversations(replicas * arguments.per_replica, groups=replicas)
        for policy in arguments.policies.split(","):
            progress(f"{policy} on {replicas} workers")
            yield {"replicas": replicas, "policy": policy, **_run(arguments, replicas, policy, talk)}


def _run(arguments: argparse.Namespace, replicas: int, policy: str, talk: list[Conversation]) -> dict[str, float]:
    """Starts a cluster of simulated workers with the policy, holds all conversations, and returns hit rate, time to
    first token, throughput and preemptions."""
    worker = {
        "engine": "simulated",
        "simulated_workers": replicas,
        "simulated_step_ms": arguments.step_ms,
        "num_blocks": arguments.blocks,
        "log_level": "error",
    }
    settings = {"worker": worker, "scheduler": {"placement": policy, "log_level": "error"}}
    with Cluster(ClusterOptions(http_port=0, grpc_port=0, settings=settings)) as cluster:
        begin = time.monotonic()
        tally = asyncio.run(_converse(cluster.grpc_address, talk, arguments.answer))
        elapsed = time.monotonic() - begin
        with Client(cluster.grpc_address) as client:
            scheduler = next(s for s in client.status() if s.role == admin_pb2.ROLE_SCHEDULER)
    assert scheduler.blocks.used == 0
    return {
        "hit_rate": tally.cached_tokens / tally.prompt_tokens,
        **spread_ms("ttft", tally.ttft_s, (0.5, 0.99)),
        "out_tok_s": tally.output_tokens / elapsed,
        "preemptions": scheduler.work.preemptions,
    }


async def _converse(address: str, talk: list[Conversation], answer: int) -> Tally:
    """Holds all conversations at once and returns their tally; `answer` is the number of output tokens of a turn."""
    tally = Tally()
    client = AsyncClient(address)
    await asyncio.gather(*(_follow(client, conversation, answer, tally) for conversation in talk))
    await client.close()
    return tally


async def _follow(client: AsyncClient, conversation: Conversation, answer: int, tally: Tally) -> None:
    """Sends the turns of a conversation; every prompt starts with the conversation so far."""
    params = SamplingParams(max_tokens=answer, ignore_eos=True, detokenize=False)
    history = list(conversation.system)
    for turn in conversation.turns:
        history += turn
        begin, first = time.monotonic(), None
        async for message in client.messages(history, params):
            first = first or time.monotonic()
            history += message.token_ids
            tally.output_tokens += len(message.token_ids)
            usage = message.usage
        tally.ttft_s.append((first or time.monotonic()) - begin)
        tally.prompt_tokens += usage.prompt_tokens
        tally.cached_tokens += usage.cached_tokens
