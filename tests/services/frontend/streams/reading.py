"""Reads resumable streams over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running

Sampling = sampling_pb2.SamplingParams
PROMPT = pb.TokenIds(ids=[70, 71, 72])


def asked(request_id: str, tenant: str = "", retention_s: float = 0, **sampling: Any) -> pb.GenerateRequest:
    values = {"max_tokens": 24, "ignore_eos": True, "seed": 30, **sampling}
    options = pb.RequestOptions(request_id=request_id, tenant=tenant)
    return pb.GenerateRequest(
        token_ids=PROMPT, sampling=Sampling(**values), options=options, resumable=True, retention_s=retention_s
    )


def attach(frontend: Running, request_id: str, offset: int = 0, tenant: str = "", **more: Any) -> Any:
    return frontend.inference.Attach(pb.AttachRequest(request_id=request_id, offset=offset, tenant=tenant), **more)


async def bare(call: AsyncIterator[pb.AttachResponse]) -> list[Any]:
    """Returns the messages without their offsets."""
    return [getattr(one, one.WhichOneof("message")) async for one in call]


async def everything(call: AsyncIterator[Any]) -> list[Any]:
    return [message async for message in call]


async def first(call: Any, count: int) -> list[Any]:
    """Reads so many messages, then disconnects."""
    found = []
    async for message in call:
        found.append(message)
        if len(found) == count:
            break
    call.cancel()
    return found


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (everything(call) if hasattr(call, "__aiter__") else call)
    return refused.value


def offsets(messages: list[Any]) -> list[int | None]:
    return [message.offset if message.HasField("offset") else None for message in messages]


def text(messages: list[Any]) -> str:
    return "".join(message.text for message in messages)


def tokens(messages: list[Any]) -> list[int]:
    return [token for message in messages for token in message.token_ids]
