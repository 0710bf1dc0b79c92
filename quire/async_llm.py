"""`AsyncLLM`, the asyncio version of `LLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from quire.async_client import AsyncClient
from quire.offline.embedded_cluster import EmbeddedCluster
from quire.offline.generation_handle import GenerationHandle
from quire.offline.lora import LoRARequest
from quire.outputs import Classification, Ranked, RequestOutput
from quire.params import SamplingParams
from quire.requests import ChatExtras, ChatMessages, EmbedExtras, Prompt, RequestOptions, Scored


class AsyncLLM(EmbeddedCluster):
    """Asyncio interface to a cluster: `async with AsyncLLM() as llm: result = await llm.generate("Once upon a time")`.

    `async for output in llm.generate(...)` yields the growing result. `lora_request` of every method: an adapter,
    which is loaded if needed.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        """Starts a cluster, or connects to one, with the arguments and errors of EmbeddedCluster. Blocks until the
        cluster is ready, the event loop included: construct it before the loop has other work, or in a thread."""
        super().__init__(model, **options)
        self.client = AsyncClient(self.address, api_key=self._api_key)
        self.stream = self.client.stream
        self.stream_chat = self.client.stream_chat
        self.embed_stream = self.client.embed_stream
        self.transcribe = self.client.transcribe
        self.stream_transcription = self.client.stream_transcription
        self.files = self.client.files  # requires batch_folder= on the cluster
        self.batches = self.client.batches

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str = "",
        *,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        options: RequestOptions | None = None,
    ) -> GenerationHandle:
        """Continues a prompt. The handle can be awaited for the complete output or iterated for cumulative ones,
        once; nothing is sent before that."""
        options = options or RequestOptions()
        if request_id:
            options = replace(options, request_id=request_id)
        return GenerationHandle(
            self.client, prompt, params or sampling_params, partial(self._chosen, lora_request, options)
        )

    async def chat(
        self,
        messages: ChatMessages,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **extras: Unpack[ChatExtras],
    ) -> RequestOutput:
        """Returns the assistant's complete answer; the adapter of `lora_request` is loaded if it is not yet."""
        return await self.client.chat(messages, params, await self._chosen(lora_request, options), **extras)

    async def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        options: RequestOptions | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **extras: Unpack[EmbedExtras],
    ) -> list[list[float]]:
        """Returns one vector per input; the adapter of `lora_request` is loaded if it is not yet."""
        return await self.client.embed(inputs, await self._chosen(lora_request, options), **extras)

    async def encode(
        self,
        inputs: Prompt | Sequence[Prompt],
        options: RequestOptions | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **extras: Unpack[EmbedExtras],
    ) -> list[list[list[float]]]:
        """Returns one vector per token of each input: [inputs][tokens][dimensions]."""
        return await self.client.encode(inputs, await self._chosen(lora_request, options), **extras)

    async def classify(
        self,
        inputs: Prompt | Sequence[Prompt],
        options: RequestOptions | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[Classification]:
        """Returns the classification of each input, by a model with a classification head."""
        return await self.client.classify(inputs, await self._chosen(lora_request, options))

    async def score(
        self,
        queries: str | Sequence[str],
        documents: Scored | Sequence[Scored],
        options: RequestOptions | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[float]:
        """Returns one score per (query, document) pair; a single query is scored with all documents."""
        return await self.client.score(queries, documents, await self._chosen(lora_request, options))

    async def rerank(
        self,
        query: str,
        documents: Sequence[Scored],
        top_n: int = 0,
        options: RequestOptions | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[Ranked]:
        """Returns the documents with their scores, best first; `top_n` of 0 returns all of them."""
        return await self.client.rerank(query, documents, top_n, await self._chosen(lora_request, options))

    async def load_lora_adapter(self, lora_name: str, lora_path: str, load_inplace: bool = False) -> int:
        """Loads an adapter; see LLM.load_lora_adapter()."""
        return await asyncio.to_thread(self._adapters.load, lora_name, lora_path, replace=load_inplace)

    async def unload_lora_adapter(self, lora_name: str) -> int:
        """Unloads an adapter; see LLM.unload_lora_adapter()."""
        return await asyncio.to_thread(self._adapters.unload, lora_name)

    async def _chosen(self, asked: LoRARequest | None, options: RequestOptions | None) -> RequestOptions:
        if asked is None:
            return options or RequestOptions()
        return await asyncio.to_thread(self._adapters.chosen, asked, options)

    async def close(self) -> None:
        await self.client.close()
        self._blocking.close()
        self._stop()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
