"""Preparation of generation requests: checks, tokens, and the parameters of their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.services.frontend.bounds.prompts import check_length
from quire.services.frontend.input_processor import prompt_limits
from quire.services.frontend.input_processor.grammars.grammar_validator import GrammarValidator
from quire.services.frontend.input_processor.media_placement import place_media
from quire.services.frontend.input_processor.prepared_prompt import (
    PreparedPrompt,
    PromptOptions,
    PromptRequestBuilder,
    yield_periodically,
)
from quire.services.frontend.input_processor.prompt_limits import PromptTokens
from quire.services.frontend.input_processor.sampling import sampling_rules
from quire.services.frontend.input_processor.sampling.sampling_message import (
    bad_word_columns,
    grammar_bytes,
    timestamp_rules,
    to_message,
)
from quire.services.frontend.media.pipeline import PromptMedia
from quire.services.frontend.media.store import MediaHolds
from quire.services.frontend.request.request import (
    Prompt,
    Request,
    Sampling,
    TextPrompt,
    TokenPrompt,
    decoder_of,
    media_of,
)
from quire.services.frontend.scheduler_client.client import ClusterLimits
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.columns import i32_bytes, u32_bytes
from quire.shared.errors import InvalidArgument
from quire.shared.kv.block_hash import TOKEN_BYTES
from quire.shared.media.modalities import TEXT
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.common.v1 import media_pb2
from quire.shared.pb.worker.v1.worker_pb2 import SequenceParams

MediaItems = tuple[media_pb2.MediaItem, ...]
OptionsFactory = Callable[[int], PromptOptions]  # from the number of prompt tokens; raises InvalidArgument


class GenerationPreparer:
    """Preparer of generation requests; `tokens` reads the prompts."""

    def __init__(self, tokens: PromptTokens, tokenizer: Tokenizer, vocab_size: int, media: PromptMedia) -> None:
        self._media = media
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._grammar_validator = GrammarValidator(tokenizer.specials, vocab_size)

    def close(self) -> None:
        """Ends the processes that compile grammars."""
        self._grammar_validator.close()

    async def prepare(
        self, request: Request, limits: ClusterLimits, adapter: AdapterId | None, holds: MediaHolds
    ) -> list[PreparedPrompt]:
        """Checks the request against the cluster's limits, tokenizes its prompts and returns a scheduler request for
        each; holds their media. Raises InvalidArgument for a prompt or parameter out of bounds; yields to the event
        loop between prompts."""
        options_of = await self._options(request, limits, adapter)
        builder, prepared = PromptRequestBuilder(request, adapter), []
        for number, prompt in enumerate(request.prompts):
            await yield_periodically(number)
            column, media = await self._column(prompt, request, limits.max_model_len, holds)
            options = options_of(len(column) // TOKEN_BYTES)
            num_encoder_tokens = sum(item.num_embeddings for item in media if item.modality == TEXT)
            prepared.append(
                PreparedPrompt(builder.build(column, options, media), num_encoder_tokens=num_encoder_tokens)
            )
        return prepared

    async def _column(
        self, prompt: Prompt, request: Request, max_model_len: int, holds: MediaHolds
    ) -> tuple[bytes, MediaItems]:
        """Reads a prompt as a column of token ids; of a prompt that is too long, only the first tokens. Its media are
        in their places."""
        if self._media.encoder is not None:
            return await self._encoded(prompt, request, max_model_len, holds)
        truncated = request.truncate_prompt_tokens is not None
        if isinstance(prompt, TokenPrompt) and not truncated:
            check_length(len(prompt.token_ids), max_model_len)  # before they are copied
        tokenized = await self._tokens.tokenize(prompt, max_model_len, None if truncated else max_model_len)
        parts = media_of(prompt)
        if not parts:
            token_ids = prompt_limits.truncate(tokenized.token_ids, request, max_model_len)
            return prompt_limits.column(token_ids, max_model_len, self._vocab_size), ()
        token_ids, items = await place_media(self._media, tokenized, parts, request, holds, max_model_len=max_model_len)
        return prompt_limits.column(token_ids, max_model_len, self._vocab_size), items

    async def _encoded(
        self, prompt: Prompt, request: Request, max_model_len: int, holds: MediaHolds
    ) -> tuple[bytes, MediaItems]:
        """Reads a prompt for the encoder as an item; returns the column of the decoder's tokens, and the item."""
        encoder, truncated = self._media.encoder, request.truncate_prompt_tokens is not None
        assert encoder is not None
        most = encoder.max_tokens
        if isinstance(prompt, TokenPrompt) and not truncated:
            check_length(len(prompt.token_ids), most, is_continued=False)  # before they are copied
        tokenized = await self._tokens.tokenize(prompt, most, None if truncated else most)
        token_ids = prompt_limits.truncate(tokenized.token_ids, request, most)
        prompt_limits.column(token_ids, most, self._vocab_size, generates=False)
        given = decoder_of(prompt)
        if isinstance(given, str):
            text = TextPrompt(given, add_special_tokens=False)
            given = (await self._tokens.tokenize(text, max_model_len, max_model_len)).token_ids
        column = prompt_limits.column(encoder.decoder_prompt(given), max_model_len, self._vocab_size)
        return column, (await encoder.item(token_ids, holds),)

    async def _options(self, request: Request, limits: ClusterLimits, adapter: AdapterId | None) -> OptionsFactory:
        """Checks the sampling parameters (grammar, vocabulary, logprobs, logits processors) and returns the function
        that completes them for a prompt of a given length. Raises on the first parameter that the model or the
        cluster does not offer."""
        if request.sampling.structured_output is not None:
            await self._grammar_validator.check(request.sampling.structured_output, limits.grammar_libraries)
        sampling_rules.check_model(request.sampling, self._vocab_size, limits.max_logprobs)
        sampling_rules.check_known_processors(request.sampling, limits.logits_processors)
        sampling = sampling_rules.normalize(request.sampling)
        bad_words = await bad_word_columns(sampling.bad_words, self._tokenizer)
        thinking = self._thinking_columns(sampling)
        eos = u32_bytes(self._eos_ids(sampling))
        grammar = grammar_bytes(sampling)
        timestamps = timestamp_rules(sampling)

        def options_of(num_prompt_tokens: int) -> PromptOptions:
            """Completes the parameters with the output length for a prompt of `num_prompt_tokens` and serializes
            them."""
            prompt_limits.check_prompt_logprobs(sampling, num_prompt_tokens)
            complete = to_message(sampling, self._output_length(request, num_prompt_tokens, limits))
            params = SequenceParams(
                sampling=complete,
                eos_token_ids=eos,
                bad_word_token_ids=bad_words,
                think_start_token_ids=thinking[0],
                think_end_token_ids=thinking[1],
                tenant=request.tenant if grammar else "",
                adapter=adapter.name if adapter else "",
                adapter_digest=adapter.digest if adapter else b"",
                timestamps=timestamps,
            )
            return PromptOptions(complete, params.SerializeToString(), eos, grammar)

        return options_of

    def _thinking_columns(self, sampling: Sampling) -> tuple[bytes, bytes]:
        """Returns the columns of the tokens that begin and end reasoning; empty without a thinking budget."""
        if sampling.thinking_token_budget is None:
            return b"", b""
        marks = self._tokenizer.thinking_token_ids
        if marks is None:
            text = "thinking_token_budget needs a model that marks its reasoning; this one has no such tokens."
            raise InvalidArgument(text, field="thinking_token_budget")
        return i32_bytes(marks[:1]), i32_bytes(marks[1:])

    def _eos_ids(self, sampling: Sampling) -> Sequence[int]:
        """Returns the end-of-sequence tokens; with ignore_eos, a grammar that allows nothing more still ends the
        answer."""
        return () if sampling.ignore_eos and sampling.structured_output is None else self._tokenizer.eos_ids

    def _output_length(self, request: Request, num_prompt_tokens: int, limits: ClusterLimits) -> int:
        recommended = self._tokenizer.defaults.max_new_tokens
        return prompt_limits.output_length(request, num_prompt_tokens, limits.max_model_len, recommended)
