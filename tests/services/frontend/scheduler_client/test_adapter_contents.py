"""Adapter digests reported by schedulers decide where prefixes are looked up and which adapters exist."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from quire.shared.kv import block_hash
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually

REQUEST = pb.GenerateRequest(text="x", model="a")
DIGEST, OTHER = b"x" * 32, b"y" * 32


async def test_prefixes_of_an_adapter_are_those_of_its_weights(folder: Path) -> None:
    script = ScriptedScheduler(count_up, adapters=["a"], adapter_digests=DIGEST)
    async with scheduler(script), running(folder, script.address) as frontend:
        async for _ in frontend.inference.Generate(REQUEST):
            pass
    (submission,) = script.submissions
    assert submission.params.adapter == "a"
    assert submission.root_hash == block_hash.root_hash(f"a\n{DIGEST.hex()}")


@asynccontextmanager
async def serving(folder: Path, *digests: bytes) -> AsyncIterator[Running]:
    """A frontend with one scheduler per entry of `digests`, all with an adapter of the same name."""
    async with AsyncExitStack() as stack:
        scripts = [ScriptedScheduler(count_up, adapters=["a"], adapter_digests=digest) for digest in digests]
        for script in scripts:
            await stack.enter_async_context(scheduler(script))
        addresses = [script.address for script in scripts]
        frontend = await stack.enter_async_context(running(folder, *addresses))
        await frontend.until_sessions(len(scripts))
        yield frontend


async def test_an_adapter_that_all_schedulers_have_is_served(folder: Path) -> None:
    async with serving(folder, DIGEST, DIGEST) as frontend:
        assert [message async for message in frontend.inference.Generate(REQUEST)]


async def test_an_adapter_of_two_contents_is_none(folder: Path) -> None:
    async with serving(folder, DIGEST, OTHER) as frontend:
        with pytest.raises(grpc.aio.AioRpcError, match="The model `a` does not exist") as refused:
            await frontend.inference.Generate(REQUEST).read()
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_scheduler_with_a_malformed_welcome_gets_no_sequences(folder: Path) -> None:
    """Its answers would not be read."""
    odd, good = (ScriptedScheduler(count_up, adapters=["a"], adapter_digests=digest) for digest in (b"x", DIGEST))
    async with scheduler(odd), scheduler(good), running(folder, odd.address, good.address) as frontend:
        await eventually(lambda: len(odd.hellos) >= 2)
        assert [message async for message in frontend.inference.Generate(REQUEST)]
    assert not odd.submissions
