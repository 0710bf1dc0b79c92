"""Preparation of pooled prompts: their tokens, truncated if requested, and the parameters of their vectors."""

from __future__ import annotations

from dataclasses import replace

from quire.services.frontend.bounds.prompts import PromptLimit, check_length
from quire.services.frontend.input_processor import prompt_limits
from quire.services.frontend.input_processor.media_placement import place_media
from quire.services.frontend.input_processor.pooling import pooling
from quire.services.frontend.input_processor.pooling.late_interaction_inputs import (
    DOCUMENT,
    QUERY,
    LateInteractionInputs,
)
from quire.services.frontend.input_processor.pooling.late_query_cache import LateQueryCache
from quire.services.frontend.input_processor.pooling.page_inputs import PageInputs
from quire.services.frontend.input_processor.pooling.pooling_traits import PoolingTraits
from quire.services.frontend.input_processor.prepared_prompt import (
    PreparedPrompt,
    PromptOptions,
    PromptRequestBuilder,
    yield_periodically,
)
from quire.services.frontend.input_processor.prompt_limits import PromptTokens
from quire.services.frontend.media.pipeline import PromptMedia
from quire.services.frontend.media.store import MediaHolds
from quire.services.frontend.request.request import (
    LateInteractionPrompt,
    PairPrompt,
    Pooling,
    Prompt,
    Request,
    TextPrompt,
    TokenPrompt,
    media_of,
)
from quire.services.frontend.scheduler_client.client import ClusterLimits
from quire.services.frontend.scheduler_client.sequence import LateQuery
from quire.services.frontend.tokenizer.encoder import Tokenized
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.common.v1 import media_pb2, sampling_pb2

MediaItems = tuple[media_pb2.MediaItem, ...]


class PoolingPreparer:
    """Preparer of requests for vectors, classes or scores; `traits`: how the model reads texts."""

    def __init__(
        self,
        tokens: PromptTokens,
        tokenizer: Tokenizer,
        vocab_size: int,
        traits: PoolingTraits,
        media: PromptMedia,
    ) -> None:
        self._media = media
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._traits = traits

    async def prepare(
        self,
        request: Request,
        pooled: Pooling,
        limits: ClusterLimits,
        adapter: AdapterId | None,
        holds: MediaHolds,
    ) -> list[PreparedPrompt]:
        """Tokenizes the prompts and returns a scheduler request for each; holds their media. Late-interaction documents
        carry their query, which is tokenized once. Raises InvalidArgument for a prompt out of bounds."""

        async def read_query(query: LateInteractionPrompt) -> LateQuery:
            tokenized, column, _ = await self._read(query, request, pooled, limits.max_model_len, holds)
            return LateQuery(column, pooling.params(pooled, adapter, tokenized))

        queries, builder, sampling = (
            LateQueryCache(read_query),
            PromptRequestBuilder(request, adapter),
            self._sampling(pooled),
        )
        prepared = []
        for number, prompt in enumerate(request.prompts):
            await yield_periodically(number)
            found, column, media = await self._read(prompt, request, pooled, limits.max_model_len, holds)
            options = PromptOptions(sampling, pooling.params(pooled, adapter, found), samples_nothing=True)
            prompt_request, num_vectors = builder.build(column, options, media), pooling.num_vectors(pooled, found)
            query, num_query_tokens = await queries.query_for(prompt)
            if query is not None:
                prompt_request, num_vectors = replace(prompt_request, late_query=query), None
            prepared.append(PreparedPrompt(prompt_request, num_vectors, num_query_tokens))
        return prepared

    def _sampling(self, pooled: Pooling) -> sampling_pb2.SamplingParams:
        """Returns the sampling parameters; poolers that use more than the last token's state, and alignments, cannot
        read the prefix cache."""
        pools_last_token = (
            self._traits.texts.pools_last_token if not pooled.pooler else pooled.pooler in pooling.LAST_TOKEN_POOLERS
        )
        skips = not pools_last_token or pooled.alignment is not None
        return sampling_pb2.SamplingParams(skip_reading_prefix_cache=skips)

    async def _read(
        self, prompt: Prompt, request: Request, pooled: Pooling, max_model_len: int, holds: MediaHolds
    ) -> tuple[Tokenized, bytes, MediaItems]:
        """Tokenizes a prompt under the named prefix prompt; returns it with its ids as an i32 column, checked
        against length and vocabulary, and its media."""
        prompt = self._traits.prompt(prompt, pooled.prompt_name)
        parts = media_of(prompt)
        items: MediaItems = ()
        if parts:
            read = await self._tokens.tokenize(prompt, max_model_len, max_model_len)
            token_ids, items = await place_media(self._media, read, parts, request, holds, max_model_len=max_model_len)
            tokenized = Tokenized(token_ids)
        else:
            tokenized = await self._tokenize(prompt, request, pooled.prompt_name, max_model_len)
        column = prompt_limits.column(tokenized.token_ids, max_model_len, self._vocab_size, generates=False)
        return tokenized, column, items

    async def _tokenize(self, prompt: Prompt, request: Request, prompt_name: str, max_model_len: int) -> Tokenized:
        """Tokenizes a prompt; truncation removes text only and keeps the special tokens around it."""
        late = self._traits.late
        if late is not None and isinstance(prompt, LateInteractionPrompt):
            return await self._read_late(prompt, late, max_model_len)
        if late is not None and isinstance(prompt, TextPrompt) and prompt_name in (QUERY, DOCUMENT):
            named = LateInteractionPrompt(prompt.text, is_query=prompt_name == QUERY)
            return await self._read_late(named, late, max_model_len)
        keep = prompt_limits.max_kept_tokens(request, max_model_len)
        if isinstance(prompt, TokenPrompt) and keep is None:
            check_length(len(prompt.token_ids), max_model_len, is_continued=False)
        side = request.truncation_side
        limit = PromptLimit(max_model_len if keep is not None else 0, self._tokenizer.longest_token)
        framed = isinstance(prompt, PairPrompt)
        if isinstance(prompt, TextPrompt):
            framed = prompt.add_special_tokens
            prompt = TextPrompt(limit.truncate(self._traits.texts.text(prompt.text, prompt_name), side), framed)
        elif isinstance(prompt, PairPrompt):
            prompt = PairPrompt(*limit.truncate_pair(prompt.first, prompt.second, side))
        reads_end = keep is not None and side == "left"
        tokenized = await self._tokens.tokenize(prompt, max_model_len, None if reads_end else max_model_len)
        frame = self._tokenizer.frame if framed else ([], [])
        token_ids = prompt_limits.truncate_framed(tokenized.token_ids, request, max_model_len, frame)
        lost = len(tokenized.token_ids) - len(token_ids) if reads_end else 0
        second = max(tokenized.second_text_from - lost, len(frame[0])) if tokenized.second_text_from else 0
        if self._traits.towers is not None:
            token_ids = self._traits.towers.padded(token_ids)
        types = self._traits.token_types and second < len(token_ids)
        return Tokenized(token_ids, second if types else 0)

    async def _read_late(
        self, prompt: LateInteractionPrompt, late: LateInteractionInputs | PageInputs, max_model_len: int
    ) -> Tokenized:
        """Reads a query or document and truncates it to the length that the model was trained with."""
        limit = PromptLimit(late.max_text_tokens(is_query=prompt.is_query), self._tokenizer.longest_token)
        whole = late.text(self._traits.texts.text(prompt.text, ""), is_query=prompt.is_query)
        text = TextPrompt(limit.truncate(whole), add_special_tokens=False)
        tokenized = await self._tokens.tokenize(text, max_model_len, limit.max_model_len)
        return late.build(tokenized.token_ids, is_query=prompt.is_query)
