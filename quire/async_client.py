"""Asyncio client for a cluster's gRPC API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar, Unpack

import grpc

from quire.client import DEFAULT_ADDRESS
from quire.clients import calls
from quire.clients.api_key import with_api_key
from quire.clients.batches import AsyncBatches, AsyncFiles
from quire.clients.calls import InferenceCall
from quire.outputs import Classification, Delta, Message, Ranked, RequestOutput, collect
from quire.params import SamplingParams
from quire.requests import ChatExtras, ChatMessages, EmbedExtras, Prompt, RequestOptions, Scored, plain
from quire.rpc_errors import from_rpc
from quire.shared.pb.batch.v1 import batch_pb2_grpc
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1 import inference_pb2_grpc
from quire.shared.rpc.channel import connect
from quire.shared.security.tls_files import NO_TLS, Tls
from quire.shared.transcription.transcript import Transcript
from quire.transcriptions import TranscriptDelta, TranscriptionExtras, collected

T = TypeVar("T")


class AsyncClient:
    """Client for asyncio. Create it inside a running loop; close it, or use it in an `async with` statement."""

    def __init__(self, address: str = DEFAULT_ADDRESS, *, tls: Tls = NO_TLS, api_key: str = "") -> None:
        self.address = address
        self._channel = connect(address, tls)
        self._inference = with_api_key(inference_pb2_grpc.InferenceServiceStub(self._channel), api_key)
        self.files = AsyncFiles(with_api_key(batch_pb2_grpc.FileServiceStub(self._channel), api_key))
        self.batches = AsyncBatches(with_api_key(batch_pb2_grpc.BatchServiceStub(self._channel), api_key))

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> RequestOutput:
        return await self._gather(calls.whole_generation(prompt, params, options), plain(prompt))

    async def chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **extras: Unpack[ChatExtras],
    ) -> RequestOutput:
        """Returns the complete answer of the assistant; raises a QuireError as the server reports it."""
        return await self._gather(calls.whole_chat(messages, params, options, extras), messages)

    async def embed(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None, **extras: Unpack[EmbedExtras]
    ) -> list[list[float]]:
        return await self._ask(calls.embed(inputs, options, extras))

    def embed_stream(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None, **extras: Unpack[EmbedExtras]
    ) -> AsyncIterator[tuple[int, list[float]]]:
        return self._stream(calls.embed_stream(inputs, options, extras))

    async def encode(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None, **extras: Unpack[EmbedExtras]
    ) -> list[list[list[float]]]:
        return await self._ask(calls.encode(inputs, options, extras))

    async def classify(
        self, inputs: Prompt | Sequence[Prompt], options: RequestOptions | None = None
    ) -> list[Classification]:
        return await self._ask(calls.classify(inputs, options))

    async def score(
        self, queries: str | Sequence[str], documents: Scored | Sequence[Scored], options: RequestOptions | None = None
    ) -> list[float]:
        return await self._ask(calls.score(queries, documents, options))

    async def rerank(
        self, query: str, documents: Sequence[Scored], top_n: int = 0, options: RequestOptions | None = None
    ) -> list[Ranked]:
        return await self._ask(calls.rerank(query, documents, top_n, options))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> AsyncIterator[Delta]:
        return self._stream(calls.generation(prompt, params, options))

    def messages(
        self, prompt: Prompt, params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Yields the protocol's own messages, with usage and log-probabilities."""
        return self._stream(calls.generation_messages(prompt, params, options))

    def stream_chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **extras: Unpack[ChatExtras],
    ) -> AsyncIterator[Delta]:
        """Yields the assistant's answer in deltas. Leaving the loop early cancels the call, unless it is resumable."""
        return self._stream(calls.chat(messages, params, options, extras))

    async def transcribe(
        self, sound: Any, options: RequestOptions | None = None, **extras: Unpack[TranscriptionExtras]
    ) -> Transcript:
        """Returns the text of a file of sound, as Client.transcribe()."""
        return collected([delta async for delta in self.stream_transcription(sound, options, **extras)])

    def stream_transcription(
        self, sound: Any, options: RequestOptions | None = None, **extras: Unpack[TranscriptionExtras]
    ) -> AsyncIterator[TranscriptDelta]:
        """Yields the text of a file of sound as it is computed; leaving the loop early cancels the call."""
        return self._stream(calls.transcribe(sound, options, extras))

    def attach(self, request_id: str, offset: int = 0, *, tenant: str = "") -> AsyncIterator[Delta]:
        return self._stream(calls.attach(request_id, offset, tenant))

    async def cancel(self, request_id: str, *, tenant: str = "") -> None:
        await self._ask(calls.cancel(request_id, tenant))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, call: InferenceCall[T]) -> T:
        """Awaits a unary call and converts its response; a gRPC error is raised as the matching QuireError."""
        try:
            return call.read(await call.on(self._inference))
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    async def _stream(self, call: InferenceCall[T]) -> AsyncIterator[T]:
        """Yields the converted messages of a streaming call; gRPC errors are raised as QuireErrors. The call is
        cancelled when the iteration ends."""
        messages = call.on(self._inference)
        try:
            async for message in messages:
                yield call.read(message)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            messages.cancel()  # leaving the loop early frees the blocks; a resumable stream continues

    async def _gather(self, call: InferenceCall[Message], prompt: object) -> RequestOutput:
        """Collects a stream's messages into one output; a gRPC error is raised as the matching QuireError."""
        try:
            return collect([message async for message in call.on(self._inference)], prompt)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
