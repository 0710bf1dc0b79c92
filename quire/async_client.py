"""A cluster's gRPC API from Python, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Unpack

import grpc

from quire.api_key import showing_key
from quire.batches import AsyncBatches, AsyncFiles
from quire.client import DEFAULT_ADDRESS
from quire.outputs import (
    Classification,
    Delta,
    Message,
    Ranked,
    RequestOutput,
    attached,
    classifications,
    collect,
    delta,
    ranked,
    token_vectors,
    vector,
    vectors,
)
from quire.params import SamplingParams
from quire.requests import (
    ChatExtras,
    ChatMessages,
    EmbedExtras,
    Prompt,
    RequestOptions,
    chat_request,
    classify_request,
    embed_request,
    from_rpc,
    generate_request,
    in_one_piece,
    is_one,
    plain,
    rerank_request,
    score_request,
)
from quire.shared.pb.batch.v1 import batch_pb2_grpc
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from quire.shared.rpc.channel import connect
from quire.shared.security.tls_files import NO_TLS, Tls


class AsyncClient:
    """As Client, for asyncio. Create it inside a running loop; close it, or use it in an `async with` statement."""

    def __init__(self, address: str = DEFAULT_ADDRESS, *, tls: Tls = NO_TLS, api_key: str = "") -> None:
        self.address = address
        self._channel = connect(address, tls)
        self._inference = showing_key(inference_pb2_grpc.InferenceServiceStub(self._channel), api_key)
        self.files = AsyncFiles(showing_key(batch_pb2_grpc.FileServiceStub(self._channel), api_key))
        self.batches = AsyncBatches(showing_key(batch_pb2_grpc.BatchServiceStub(self._channel), api_key))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> RequestOutput:
        call = self._inference.Generate(generate_request(prompt, params, in_one_piece(options)))
        return await _gather(call, plain(prompt))

    async def chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **extras: Unpack[ChatExtras],
    ) -> RequestOutput:
        call = self._inference.Chat(chat_request(messages, params, in_one_piece(options), extras))
        return await _gather(call, messages)

    async def embed(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None, **extras: Unpack[EmbedExtras]
    ) -> list[list[float]]:
        batch = [inputs] if is_one(inputs) else list(inputs)
        try:
            return vectors(await self._inference.Embed(embed_request(batch, options or RequestOptions(), extras)))  # type: ignore[arg-type]
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def embed_stream(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None, **extras: Unpack[EmbedExtras]
    ) -> AsyncIterator[tuple[int, list[float]]]:
        batch = [inputs] if is_one(inputs) else list(inputs)
        asked = pb.EmbedStreamRequest(embed=embed_request(batch, options or RequestOptions(), extras))  # type: ignore[arg-type]
        call = self._inference.EmbedStream(asked)
        try:
            async for message in call:
                yield vector(message)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()

    async def encode(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None, **extras: Unpack[EmbedExtras]
    ) -> list[list[list[float]]]:
        batch = [inputs] if is_one(inputs) else list(inputs)
        request = embed_request(batch, options or RequestOptions(), extras)  # type: ignore[arg-type]
        try:
            return token_vectors(await self._inference.Embed(request))
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def classify(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None
    ) -> list[Classification]:
        batch = [inputs] if is_one(inputs) else list(inputs)
        request = classify_request(batch, options or RequestOptions())  # type: ignore[arg-type]
        try:
            return classifications(await self._inference.Classify(request))
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], options: RequestOptions | None = None
    ) -> list[float]:
        try:
            return [
                *(await self._inference.Score(score_request(queries, documents, options or RequestOptions()))).scores
            ]
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def rerank(
        self, query: str, documents: Sequence[str], top_n: int = 0, options: RequestOptions | None = None
    ) -> list[Ranked]:
        try:
            return ranked(
                await self._inference.Rerank(rerank_request(query, documents, top_n, options or RequestOptions()))
            )
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> AsyncIterator[Delta]:
        async for message in self.messages(prompt, params, options):
            yield delta(message)

    async def messages(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The protocol's own messages, with usage and log-probabilities."""
        call = self._inference.Generate(generate_request(prompt, params, options or RequestOptions()))
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()  # leaving the loop early frees the blocks

    async def stream_chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **extras: Unpack[ChatExtras],
    ) -> AsyncIterator[Delta]:
        call = self._inference.Chat(chat_request(messages, params, options or RequestOptions(), extras))
        async for item in _deltas(call):
            yield item

    async def attach(self, request_id: str, offset: int = 0, *, tenant: str = "") -> AsyncIterator[Delta]:
        call = self._inference.Attach(pb.AttachRequest(request_id=request_id, offset=offset, tenant=tenant))
        try:
            async for message in call:
                yield attached(message)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()

    async def cancel(self, request_id: str, *, tenant: str = "") -> None:
        try:
            await self._inference.Cancel(pb.CancelRequest(request_id=request_id, tenant=tenant))
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _gather(call: AsyncIterator[Message], prompt: object) -> RequestOutput:
    try:
        return collect([message async for message in call], prompt)
    except grpc.RpcError as error:
        raise from_rpc(error) from None


async def _deltas(call: AsyncIterator[Message]) -> AsyncIterator[Delta]:
    try:
        async for message in call:
            yield delta(message)
    except grpc.RpcError as error:
        raise from_rpc(error) from None
    finally:
        call.cancel()  # type: ignore[attr-defined]  # leaving the loop early frees the blocks
