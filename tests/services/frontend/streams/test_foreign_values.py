"""Foreign values in Redis break one stream; frontends and all other streams continue."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.services.frontend.streams.pair import Pair
from tests.services.frontend.streams.reading import asked, attach, bare, everything, offsets, refusal, tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUMBERS = itertools.count()
GARBAGE = b"\xff\xff\xff not a message"
NAMES = ("request", "log", "lease", "read", "cancel", "deleted")


def _key(client: Any, request_id: str, name: str) -> bytes:
    """Returns the Redis key of a part of a stream."""
    (log,) = client.keys(f"*:log:{request_id}")
    return bytes(log.replace(b":log:", f":{name}:".encode()))


def _garbage_request(client: Any, request_id: str) -> None:
    client.set(_key(client, request_id, "request"), GARBAGE)


def _garbage_entry(client: Any, request_id: str) -> None:
    client.rpush(_key(client, request_id, "log"), GARBAGE)


def _other_types(client: Any, request_id: str) -> None:
    for name, key in [(name, _key(client, request_id, name)) for name in NAMES]:
        client.delete(key)
        if name in ("request", "lease"):
            client.rpush(key, GARBAGE)
        else:
            client.set(key, GARBAGE)


@pytest.mark.parametrize("write", [_garbage_request, _garbage_entry, _other_types])
async def test_the_stream_is_lost_and_no_other(pair: Pair, write: Callable[[Any, str], None]) -> None:
    bad, good = f"bad{next(NUMBERS)}", f"good{next(NUMBERS)}"
    for request_id in (bad, good):
        assert await everything(pair.a.inference.Generate(asked(request_id)))
    with pair.ask_redis() as client:
        write(client, bad)
    refused = await refusal(attach(pair.b, bad))
    assert refused.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
    assert "Traceback" not in (refused.details() or "")
    found = await bare(attach(pair.b, good))
    assert offsets(found)[-1] is not None
    assert (await pair.b.http.get("/health")).status_code == 200


async def test_a_reader_of_another_stream_at_the_same_look_reads_on(pair: Pair) -> None:
    bad, good = f"bad{next(NUMBERS)}", f"good{next(NUMBERS)}"
    whole = await everything(pair.a.inference.Generate(asked(bad)))
    call = aiter(pair.a.inference.Generate(asked(good)))
    begun = await anext(call)
    elsewhere = asyncio.create_task(bare(attach(pair.b, good)))
    with pair.ask_redis() as client:
        _other_types(client, bad)
    lost = asyncio.create_task(refusal(attach(pair.b, bad)))
    own = [begun, *await everything(call)]
    assert tokens(own) == tokens(whole)
    assert tokens(await elsewhere) == tokens(own)
    await lost
