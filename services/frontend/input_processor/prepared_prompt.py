"""Prompts that are ready to be submitted, and the work that schedulers get of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from quire.services.frontend.request.request import Request
from quire.services.frontend.scheduler_client.prompt_hashes import PromptHashes
from quire.services.frontend.scheduler_client.sequence import PromptRequest
from quire.shared.columns import i32
from quire.shared.kv import block_hash
from quire.shared.kv.block_hash import TOKEN_BYTES
from quire.shared.models import adapter_ids
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.common.v1 import sampling_pb2

PROMPTS_PER_YIELD = 32  # of the event loop: 1 to 2 ms


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt ready to be submitted."""

    prompt_request: PromptRequest
    num_vectors: int | None = None  # of single tokens; None: there is one of all, or nothing is pooled
    num_query_tokens: int = 0  # that were read for it as well: of a query that it is the first to be compared with

    @property
    def num_tokens(self) -> int:
        """All that was read."""
        return self.prompt_request.num_prompt_tokens + self.num_query_tokens

    @property
    def token_ids(self) -> list[int]:
        """Made anew: kept, they would take nine times as much as the column."""
        ids: list[int] = i32(self.prompt_request.prompt).tolist()
        return ids

    def last_token_ids(self, count: int) -> list[int]:
        ids: list[int] = i32(self.prompt_request.prompt)[-count:].tolist()
        return ids


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Parameters of a prompt, as schedulers and workers read them."""

    sampling: sampling_pb2.SamplingParams
    params: bytes  # SequenceParams
    eos_token_ids: bytes = b""  # u32 column
    grammar: bytes = b""
    samples_nothing: bool = False


class PromptRequestBuilder:
    """Makes the work of one request, prompt by prompt."""

    def __init__(self, request: Request, adapter: AdapterId | None) -> None:
        self._request = request
        self._adapter = adapter
        self._root_hash = block_hash.root_hash(adapter_ids.hash_text(*adapter) if adapter else "", request.cache_salt)

    def build(self, column: bytes, options: PromptOptions) -> PromptRequest:
        """`column`: the prompt's tokens, i32."""
        request = self._request
        return PromptRequest(
            request_id=request.request_id,
            traceparent=request.traceparent,
            prompt=column,
            num_prompt_tokens=len(column) // TOKEN_BYTES,
            hashes=PromptHashes(self._root_hash, column),
            sampling=options.sampling,
            eos_token_ids=options.eos_token_ids,
            params=options.params,
            grammar=options.grammar,
            samples_nothing=options.samples_nothing,
            priority=request.priority,
            kv_priority=request.kv_priority,
            tenant=request.tenant,
            arrival_s=request.arrival_s,
            deadline_s=request.deadline_s,
            adapter=self._adapter,
        )


async def yield_periodically(number: int) -> None:
    """Yields to the event loop before every PROMPTS_PER_YIELD-th prompt of a request."""
    if number % PROMPTS_PER_YIELD == PROMPTS_PER_YIELD - 1:
        await asyncio.sleep(0)
