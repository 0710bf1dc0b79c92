"""Prompts that are ready to be submitted, and the requests that schedulers get for them."""

from __future__ import annotations

from dataclasses import dataclass

from quire.services.frontend.bounds.bodies.heavy_work import leave_turns
from quire.services.frontend.request.request import Request
from quire.services.frontend.scheduler_client.sequence import PromptHashes, PromptRequest
from quire.shared.columns import i32
from quire.shared.kv import block_hash
from quire.shared.kv.block_hash import TOKEN_BYTES
from quire.shared.models import adapter_ids
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.common.v1 import media_pb2, sampling_pb2

PROMPTS_PER_YIELD = 16  # leaves the event loop to others after about 1 ms


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """Prompt that is ready to be submitted."""

    prompt_request: PromptRequest
    num_vectors: int | None = None  # number of token vectors; None: a single vector, or nothing is pooled
    num_query_tokens: int = 0  # tokens of a query that was first read for this prompt
    num_encoder_tokens: int = 0  # tokens of an encoder prompt

    @property
    def num_tokens(self) -> int:
        """Number of all tokens read for this prompt."""
        return self.prompt_request.num_prompt_tokens + self.num_query_tokens + self.num_encoder_tokens

    @property
    def token_ids(self) -> list[int]:
        """Token ids as a new list: as int objects they take nine times the memory of the column."""
        ids: list[int] = i32(self.prompt_request.prompt).tolist()
        return ids

    def last_token_ids(self, count: int) -> list[int]:
        ids: list[int] = i32(self.prompt_request.prompt)[-count:].tolist()
        return ids


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Parameters of a prompt for schedulers and workers."""

    sampling: sampling_pb2.SamplingParams
    params: bytes  # serialized SequenceParams
    eos_token_ids: bytes = b""  # u32 column
    grammar: bytes = b""
    samples_nothing: bool = False


class PromptRequestBuilder:
    """Builder of the scheduler requests of one request's prompts."""

    def __init__(self, request: Request, adapter: AdapterId | None) -> None:
        self._request = request
        self._adapter = adapter
        self._root_hash = block_hash.root_hash(adapter_ids.hash_text(*adapter) if adapter else "", request.cache_salt)

    def build(
        self, column: bytes, options: PromptOptions, media: tuple[media_pb2.MediaItem, ...] = ()
    ) -> PromptRequest:
        """Builds the scheduler request of a prompt.

        `column`: the prompt's tokens, i32; `media`: its pictures, by offset.
        """
        request = self._request
        return PromptRequest(
            request_id=request.request_id,
            traceparent=request.traceparent,
            prompt=column,
            num_prompt_tokens=len(column) // TOKEN_BYTES,
            hashes=PromptHashes(self._root_hash, column, media),
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
            media=media,
        )


async def yield_periodically(number: int) -> None:
    """Leaves the event loop to other tasks before every PROMPTS_PER_YIELD-th prompt of a request."""
    if number % PROMPTS_PER_YIELD == PROMPTS_PER_YIELD - 1:
        await leave_turns()
