"""Checks and preparation of requests: every check of a request is here or in a function called from here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from quire.services.frontend.bounds import prompts
from quire.services.frontend.input_processor import prompt_limits
from quire.services.frontend.input_processor.generation_preparer import GenerationPreparer
from quire.services.frontend.input_processor.pooling import pooling
from quire.services.frontend.input_processor.pooling.pooling_preparer import PoolingPreparer
from quire.services.frontend.input_processor.pooling.pooling_traits import DEFAULT_POOLING_TRAITS, PoolingTraits
from quire.services.frontend.input_processor.pooling.scoring import ScoredInput, Scoring
from quire.services.frontend.input_processor.prepared_prompt import PreparedPrompt
from quire.services.frontend.input_processor.prompt_limits import PromptTokens
from quire.services.frontend.input_processor.sampling import sampling_rules
from quire.services.frontend.media.pipeline import MediaUse, NoMedia, PromptMedia
from quire.services.frontend.media.store import NO_HOLDS, MediaHolds
from quire.services.frontend.request.media import DEFAULT_MEDIA_OPTIONS
from quire.services.frontend.request.request import (
    ChatPrompt,
    PairPrompt,
    Prompt,
    Request,
    TextPrompt,
    TokenPrompt,
    decoder_of,
    media_of,
)
from quire.services.frontend.scheduler_client.client import ClusterLimits
from quire.services.frontend.scheduler_client.submission import KV_PRIORITIES
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument, NotFound, Unimplemented
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.settings.request_limits import RequestLimits

MAX_NAME_CHARACTERS = 256  # of request_id and tenant
MAX_SALT_CHARACTERS = 1024
PRIORITY_BOUND = 2**31
WITHOUT_PRIORITY = frozenset({"", "fcfs", "fair"})  # policies that ignore priorities; others may use them
DEFAULT_BOUNDS = RequestLimits()
IDS_IN_A_TURN = 8192  # ids checked in 0.3 ms
CHARACTERS_PER_TOKEN = 4  # of ordinary text; only for the first estimate at admission


class InputProcessor:
    """Input processor of one model; keeps no state between requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_samples: int,
        bounds: RequestLimits = DEFAULT_BOUNDS,
        classes: Sequence[str] = (),
        *,
        pooling_traits: PoolingTraits = DEFAULT_POOLING_TRAITS,
        media: PromptMedia | None = None,
    ) -> None:
        """Creates the preparers and checks the model's recommended sampling.

        `classes`: those of a classifier; `pooling_traits`: how pooled texts are read; `media`: None: text only.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_samples = max_samples
        self._bounds = bounds
        self.classes = classes
        self._traits = pooling_traits
        self._tokens = PromptTokens(tokenizer)
        self._media: PromptMedia = media or NoMedia()
        self._generated = GenerationPreparer(self._tokens, tokenizer, vocab_size, self._media)
        self._pooled = PoolingPreparer(self._tokens, tokenizer, vocab_size, pooling_traits, self._media)
        try:
            sampling_rules.check(sampling_rules.build({}, tokenizer.defaults))
        except InvalidArgument as error:
            raise InvalidArgument(f"model: generation_config.json: {error.message}", field="model") from None

    @property
    def is_late_interaction(self) -> bool:
        """Whether the model has a vector per token and scores texts by their best matches."""
        return self._traits.late is not None

    def scoring(self, queries: Sequence[ScoredInput], documents: Sequence[ScoredInput]) -> Scoring:
        """Returns how this model scores documents for queries (bi-encoder, cross-encoder or late interaction);
        raises InvalidArgument for numbers of texts that do not match."""
        return Scoring.of(
            queries,
            documents,
            self.classes,
            raw_scores=self._traits.raw_scores,
            late_interaction=self.is_late_interaction,
        )

    def close(self) -> None:
        self._generated.close()

    def check(self, request: Request, max_model_len: int = 0) -> None:
        """Makes the checks that need neither tokens nor the workers' present state: prompts, sampling, pooling,
        lengths, names and priorities. Raises InvalidArgument for the first violation; `max_model_len` of 0 means
        unknown."""
        prompts.check(request, self._bounds)
        for prompt in request.prompts:
            parts = media_of(prompt)
            if parts or self._media.is_required or request.media_options != DEFAULT_MEDIA_OPTIONS:
                self._media.check(parts, request.media_options)
            if decoder_of(prompt) is not None and self._media.encoder is None:
                text = "decoder_prompt: this model has no encoder of text; send the prompt alone"
                raise InvalidArgument(text, field="decoder_prompt")
        if request.pooling is None or request.truncate_prompt_tokens is None:
            for prompt in request.prompts:
                self._tokens.check_characters(prompt, self.most_tokens(max_model_len))
        sampling_rules.check(request.sampling)
        sampling_rules.check_logits_processors(request.sampling)
        if request.pooling is not None:
            pooling.check(request.pooling, self.classes, late_interaction=self.is_late_interaction)
            self._traits.texts.check(request.pooling.prompt_name)
        elif self._traits.encoder:
            text = (
                f"The model `{self._traits.encoder}` is an encoder and generates no text; use /v1/embeddings or "
                "/pooling."
            )
            raise InvalidArgument(text, field="model")
        elif self.classes:
            raise InvalidArgument("model: it is a classifier and generates no text; use /classify", field="model")
        prompt_limits.check_output(request, max_model_len)
        prompt_limits.check_truncation_side(request.truncation_side)
        prompt_limits.check_num_samples(request, self._max_samples)
        _check_names(request)
        _check_priorities(request)

    def most_tokens(self, max_model_len: int) -> int:
        """Returns the most tokens of a prompt, which is the encoder's if the model has one of text; 0: unknown."""
        encoder = self._media.encoder
        return max_model_len if encoder is None or not max_model_len else encoder.max_tokens

    def estimate_tokens(self, request: Request, max_model_len: int) -> int:
        """Estimates the number of prompt tokens and requested output tokens without tokenizing."""
        num_requested = request.max_requested_output_tokens(max_model_len)
        return sum(_estimate(prompt) for prompt in request.prompts) + num_requested

    def holding_media(self, request: Request) -> AbstractContextManager[MediaHolds]:
        """Returns the holds on the media of a request, to be used in a `with` around prepare() and the generation."""
        has_media = self._media.encoder is not None or any(map(media_of, request.prompts))
        return self._media.holding() if has_media else nullcontext(NO_HOLDS)

    async def prepare(self, request: Request, limits: ClusterLimits, media: MediaHolds) -> list[PreparedPrompt]:
        """Returns each prompt's tokens and its parameters for schedulers and workers; holds its media. Raises
        InvalidArgument for a prompt or parameter out of bounds, Unimplemented for a priority that the schedulers
        ignore, NotFound for an adapter."""
        _check_priority(request.priority, limits)
        adapter = _adapter(request, limits)
        if request.pooling is None:
            return await self._generated.prepare(request, limits, adapter, media)
        return await self._pooled.prepare(request, request.pooling, limits, adapter, media)

    async def tokenize(self, prompt: Prompt, max_model_len: int) -> list[int]:
        """Returns the token ids of a prompt, rendered if it is a conversation and with its pictures in their
        places, for calls that only tokenize; `max_model_len` of 0 means unknown."""
        parts = media_of(prompt)
        self._media.check(parts, DEFAULT_MEDIA_OPTIONS)
        tokenized = await self._tokens.tokenize(prompt, max_model_len)
        if not parts:
            return list(tokenized.token_ids)
        with self._media.holding() as holds:
            shown = [parts[index] for index in tokenized.media]
            return list((await self._media.place(tokenized.token_ids, shown, MediaUse(), holds))[0])

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decodes ids at once in the calling thread; raises InvalidArgument for ids outside of the vocabulary."""
        prompt_limits.check_vocabulary(token_ids, self._vocab_size)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def detokenize_long(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decodes many ids and yields to the event loop between portions; raises InvalidArgument for ids outside of
        the vocabulary."""
        for start in range(0, len(token_ids), IDS_IN_A_TURN):
            prompt_limits.check_vocabulary(token_ids[start : start + IDS_IN_A_TURN], self._vocab_size)
            await asyncio.sleep(0)
        return await self._tokenizer.decode_long(token_ids, skip_special_tokens=skip_special_tokens)


def _check_names(request: Request) -> None:
    """Raises InvalidArgument if request_id, tenant or cache_salt is too long, or an id or tenant is not printable."""
    for field, text, most in (
        ("request_id", request.request_id, MAX_NAME_CHARACTERS),
        ("tenant", request.tenant, MAX_NAME_CHARACTERS),
        ("cache_salt", request.cache_salt, MAX_SALT_CHARACTERS),
    ):
        if len(text) > most:
            raise InvalidArgument(f"{field} must have at most {most} characters, got {len(text)}.", field=field)
    for field, text in (("request_id", request.request_id), ("tenant", request.tenant)):
        if not text.isprintable():
            raise InvalidArgument(f"{field} must be printable characters, got {text!r}.", field=field)


def _check_priorities(request: Request) -> None:
    """Raises InvalidArgument unless `priority` fits in a signed 32-bit integer and `kv_priority` is a known level."""
    if not -PRIORITY_BOUND <= request.priority < PRIORITY_BOUND:
        message = f"priority must be in [-2^31, 2^31 - 1], got {request.priority}."
        raise InvalidArgument(message, field="priority")
    if request.kv_priority not in KV_PRIORITIES:
        message = f"kv_priority must be one of {', '.join(KV_PRIORITIES)}, got {request.kv_priority!r}."
        raise InvalidArgument(message, field="kv_priority")


def _adapter(request: Request, limits: ClusterLimits) -> AdapterId | None:
    """Returns the adapter that `model` names, None for the model itself; raises NotFound if the workers do not have
    it."""
    if not request.adapter:
        return None
    if request.adapter not in limits.adapters:
        raise NotFound(f"The model `{request.adapter}` does not exist.", field="model")
    return AdapterId(request.adapter, limits.adapters[request.adapter])


def _check_priority(priority: int, limits: ClusterLimits) -> None:
    """Raises Unimplemented for a priority other than 0 if any scheduler runs a policy that ignores priorities."""
    without = limits.scheduling_policies & WITHOUT_PRIORITY
    if priority and without:
        policy = " and ".join(sorted(policy or "unknown" for policy in without))
        text = f"priority needs the scheduling policy 'priority'; the schedulers' policy is {policy}"
        raise Unimplemented(text, field="priority")


def _estimate(prompt: Prompt) -> int:
    """Estimates the number of tokens of a prompt from its characters, before tokenization; exact for token ids."""
    match prompt:
        case TokenPrompt(token_ids):
            return len(token_ids)
        case TextPrompt(text):
            return len(text) // CHARACTERS_PER_TOKEN + 1
        case PairPrompt(first, second):
            return (len(first) + len(second)) // CHARACTERS_PER_TOKEN + 1
        case ChatPrompt(messages):
            return sum(len(str(m.get("content") or "")) for m in messages) // CHARACTERS_PER_TOKEN + 1
