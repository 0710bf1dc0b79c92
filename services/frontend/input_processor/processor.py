"""Requests to work: every check a request can fail is here or in what this calls."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.services.frontend.bounds import prompts
from quire.services.frontend.bounds.room import Room, check_length
from quire.services.frontend.input_processor import prompt_limits
from quire.services.frontend.input_processor.grammars.grammar_validator import GrammarValidator
from quire.services.frontend.input_processor.pooling import pooling
from quire.services.frontend.input_processor.pooling.late_queries import LateQueries
from quire.services.frontend.input_processor.pooling.late_texts import DOCUMENT, QUERY, LateTexts
from quire.services.frontend.input_processor.pooling.scoring import Scoring
from quire.services.frontend.input_processor.pooling.sentence_texts import NO_READER, ReadingModel
from quire.services.frontend.input_processor.sampling import logits_processors, sampling_rules
from quire.services.frontend.input_processor.sampling.bad_words import bad_word_columns
from quire.services.frontend.input_processor.sampling.sampling_message import grammar_bytes, to_message
from quire.services.frontend.request.request import (
    ChatPrompt,
    LatePrompt,
    PairPrompt,
    Pooling,
    Prompt,
    Request,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from quire.services.frontend.scheduler_client.client import ClusterLimits
from quire.services.frontend.scheduler_client.prompt_hashes import PromptHashes
from quire.services.frontend.scheduler_client.sequence import LateQuery, Work
from quire.services.frontend.scheduler_client.submission import KV_PRIORITIES
from quire.services.frontend.tokenizer.encoder import Tokenized
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.columns import i32, i32_bytes, u32_bytes
from quire.shared.errors import InvalidArgument, NotFound, Unimplemented
from quire.shared.kv import block_hash
from quire.shared.models import adapter_contents
from quire.shared.models.adapter_contents import AdapterId
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1.worker_pb2 import SequenceParams
from quire.shared.settings.request_limits import RequestLimits

MAX_NAME_CHARACTERS = 256  # request_id, tenant
MAX_SALT_CHARACTERS = 1024
PRIORITY_BOUND = 2**31
WITHOUT_PRIORITY = frozenset({"", "fcfs", "fair"})  # policies that do not look at it; others may
DEFAULT_BOUNDS = RequestLimits()
PROMPTS_IN_A_TURN = 32  # of the event loop: 1 to 2 ms
IDS_IN_A_TURN = 8192  # looked at in 0.3 ms
CHARACTERS_PER_TOKEN = 4  # of ordinary text; only the door's first estimate


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt ready to be submitted."""

    work: Work
    num_vectors: int | None = None  # of single tokens; None: there is one of all, or nothing is pooled
    num_query_tokens: int = 0  # that were read for it as well: of a query that it is the first to be compared with

    @property
    def num_tokens(self) -> int:
        """All that was read."""
        return self.work.num_prompt_tokens + self.num_query_tokens

    @property
    def token_ids(self) -> list[int]:
        """Made anew: kept, they would take nine times as much as the column."""
        ids: list[int] = i32(self.work.prompt).tolist()
        return ids

    def last_token_ids(self, count: int) -> list[int]:
        ids: list[int] = i32(self.work.prompt)[-count:].tolist()
        return ids


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What schedulers and workers are told of a prompt beside its tokens."""

    sampling: sampling_pb2.SamplingParams
    params: bytes  # SequenceParams
    eos_token_ids: bytes = b""  # u32 column
    grammar: bytes = b""
    samples_nothing: bool = False


OptionsOf = Callable[[Tokenized], PromptOptions]  # of a prompt; raises InvalidArgument


class InputProcessor:
    """Knows the model; keeps no state between requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_samples: int,
        bounds: RequestLimits = DEFAULT_BOUNDS,
        classes: Sequence[str] = (),
        *,
        reader: ReadingModel = NO_READER,
    ) -> None:
        """`classes`: that the model knows, if that is what it does; `reader`: how texts are read that are pooled."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_samples = max_samples
        self._bounds = bounds
        self.classes = classes
        self._reader = reader
        self._grammar_validator = GrammarValidator(tokenizer.specials, vocab_size)
        try:
            sampling_rules.check(sampling_rules.build({}, tokenizer.defaults))
        except InvalidArgument as error:
            raise InvalidArgument(f"model: generation_config.json: {error.message}", field="model") from None

    @property
    def compares_tokens(self) -> bool:
        """The model has a vector for each token, and scores texts by their best matches."""
        return self._reader.late is not None

    def scoring(self, queries: Sequence[str], documents: Sequence[str]) -> Scoring:
        """How the model scores documents. Raises InvalidArgument."""
        return Scoring.of(
            queries, documents, self.classes, as_they_are=self._reader.raw_scores, by_token=self.compares_tokens
        )

    def close(self) -> None:
        self._grammar_validator.close()

    def check(self, request: Request, max_model_len: int = 0) -> None:
        """What can be refused without tokenizing and without knowing the workers, or only what they said last."""
        prompts.check(request, self._bounds)
        if request.pooling is None or request.truncate_prompt_tokens is None:
            for prompt in request.prompts:
                self._check_characters(prompt, max_model_len)
        sampling_rules.check(request.sampling)
        logits_processors.check(request.sampling)
        if request.pooling is not None:
            pooling.check(request.pooling, self.classes, by_token=self.compares_tokens)
            self._reader.texts.check(request.pooling.prompt_name)
        elif self._reader.encoder:
            text = f"The model `{self._reader.encoder}` reads texts and generates none: it is an encoder."
            raise InvalidArgument(text, field="model")
        elif self.classes:
            raise InvalidArgument("model: it classifies texts and does not continue them", field="model")
        prompt_limits.check_output(request, max_model_len)
        prompt_limits.check_truncation_side(request.truncation_side)
        prompt_limits.check_count(request, self._max_samples)
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
        if not -PRIORITY_BOUND <= request.priority < PRIORITY_BOUND:
            message = f"priority must be in [-2^31, 2^31 - 1], got {request.priority}."
            raise InvalidArgument(message, field="priority")
        if request.kv_priority not in KV_PRIORITIES:
            message = f"kv_priority must be one of {', '.join(KV_PRIORITIES)}, got {request.kv_priority!r}."
            raise InvalidArgument(message, field="kv_priority")

    def estimate_tokens(self, request: Request, max_model_len: int) -> int:
        """Prompt and promised output tokens, roughly and without tokenizing."""
        promised = request.num_promised_output_tokens(max_model_len)
        return sum(_estimate(prompt) for prompt in request.prompts) + promised

    async def prepare(self, request: Request, limits: ClusterLimits) -> list[PreparedPrompt]:
        """Each prompt's tokens, and what schedulers and workers are told of it. Raises InvalidArgument."""
        _check_priority(request.priority, limits)
        adapter = _adapter(request, limits)
        if request.pooling is None:
            asked = await self._asked_samples(request, limits, adapter)
        else:
            asked = self._asked_vector(request.pooling, adapter)
        root_hash = block_hash.root_hash(adapter_contents.text(*adapter) if adapter else "", request.cache_salt)
        queries = LateQueries(lambda query: self._late_query(query, request, limits, asked))
        prepared = []
        for number, prompt in enumerate(request.prompts):
            if number % PROMPTS_IN_A_TURN == PROMPTS_IN_A_TURN - 1:
                await asyncio.sleep(0)
            found = await self._tokenize(prompt, request, limits.max_model_len)
            token_ids, goes_on = found.token_ids, request.pooling is None
            prompt_limits.check_prompt(token_ids, limits.max_model_len, self._vocab_size, goes_on=goes_on)
            work = _work(request, token_ids, root_hash, asked(found), adapter)
            num_vectors = pooling.num_vectors(request.pooling, found)
            query, num_query_tokens = await queries.of(prompt)
            if query is not None:
                work, num_vectors = replace(work, late_query=query), None
            prepared.append(PreparedPrompt(work, num_vectors, num_query_tokens))
        return prepared

    async def _late_query(
        self, query: LatePrompt, request: Request, limits: ClusterLimits, asked: OptionsOf
    ) -> LateQuery:
        found = await self._tokenize(query, request, limits.max_model_len)
        prompt_limits.check_prompt(found.token_ids, limits.max_model_len, self._vocab_size, goes_on=False)
        return LateQuery(i32_bytes(found.token_ids), asked(found).params)

    async def _asked_samples(self, request: Request, limits: ClusterLimits, adapter: AdapterId | None) -> OptionsOf:
        if request.sampling.structured_output is not None:
            await self._grammar_validator.check(request.sampling.structured_output, limits.grammar_libraries)
        sampling_rules.check_model(request.sampling, self._vocab_size, limits.max_logprobs)
        logits_processors.check_known(request.sampling, limits.logits_processors)
        sampling = sampling_rules.settle(request.sampling)
        bad_words = await bad_word_columns(sampling.bad_words, self._tokenizer)
        thinking = self._thinking_marks(sampling)
        eos = u32_bytes(self._eos_ids(sampling))
        grammar = grammar_bytes(sampling)

        def asked_of(prompt: Tokenized) -> PromptOptions:
            num_prompt_tokens = len(prompt.token_ids)
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
            )
            return PromptOptions(complete, params.SerializeToString(), eos, grammar)

        return asked_of

    def _asked_vector(self, asked: Pooling, adapter: AdapterId | None) -> OptionsOf:
        reads_one = self._reader.texts.reads_one if not asked.pooler else asked.pooler in pooling.READ_ONE
        sampling = sampling_pb2.SamplingParams(skip_reading_prefix_cache=not reads_one)

        def asked_of(prompt: Tokenized) -> PromptOptions:
            params = pooling.params(asked, adapter, prompt)
            return PromptOptions(sampling, params, samples_nothing=True)

        return asked_of

    def _thinking_marks(self, sampling: Sampling) -> tuple[bytes, bytes]:
        """Columns of what begins and what ends a reasoning section; empty where nobody wants to know."""
        if sampling.thinking_token_budget is None:
            return b"", b""
        marks = self._tokenizer.thinking_marks
        if marks is None:
            text = "thinking_token_budget needs a model that marks its reasoning; this one has no such tokens."
            raise InvalidArgument(text, field="thinking_token_budget")
        return i32_bytes(marks[:1]), i32_bytes(marks[1:])

    def _eos_ids(self, sampling: Sampling) -> Sequence[int]:
        """A grammar that allows nothing more ends the answer, with ignore_eos, too."""
        return () if sampling.ignore_eos and sampling.structured_output is None else self._tokenizer.eos_ids

    def _output_length(self, request: Request, num_prompt_tokens: int, limits: ClusterLimits) -> int:
        recommended = self._tokenizer.defaults.max_new_tokens
        return prompt_limits.output_length(request, num_prompt_tokens, limits.max_model_len, recommended)

    async def _tokenize(self, prompt: Prompt, request: Request, max_model_len: int) -> Tokenized:
        """Of a prompt that will be refused for its length, only the first tokens."""
        if request.pooling is not None:
            return await self._tokenize_pooled(prompt, request, request.pooling.prompt_name, max_model_len)
        truncated = request.truncate_prompt_tokens is not None
        if isinstance(prompt, TokenPrompt) and not truncated:
            check_length(len(prompt.token_ids), max_model_len)  # before they are copied
            return Tokenized(self._sent(prompt))
        found = await self._ids_of(prompt, max_model_len, None if truncated else max_model_len)
        return Tokenized(prompt_limits.truncate(found.token_ids, request, max_model_len))

    def _sent(self, prompt: TokenPrompt) -> array[int]:
        """What came as ids, looked at and copied all at once: one by one takes longer than the rest of a request."""
        token_ids = np.asarray(prompt.token_ids)
        prompt_limits.check_vocabulary(token_ids, self._vocab_size)
        return array("i", i32_bytes(token_ids))

    async def _tokenize_pooled(
        self, prompt: Prompt, request: Request, prompt_name: str, max_model_len: int
    ) -> Tokenized:
        """What is cut off is text: marks that the tokenizer puts around it stay."""
        late = self._reader.late
        if late is not None and isinstance(prompt, TextPrompt) and prompt_name in (QUERY, DOCUMENT):
            prompt = LatePrompt(prompt.text, is_query=prompt_name == QUERY)
        if late is not None and isinstance(prompt, LatePrompt):
            return await self._read_late(prompt, late, max_model_len)
        keep = prompt_limits.num_kept(request, max_model_len)
        if isinstance(prompt, TokenPrompt) and keep is None:
            check_length(len(prompt.token_ids), max_model_len, goes_on=False)
        side = request.truncation_side
        room = Room(max_model_len if keep is not None else 0, self._tokenizer.longest_token)
        framed = isinstance(prompt, PairPrompt)
        if isinstance(prompt, TextPrompt):
            framed = prompt.add_special_tokens
            prompt = TextPrompt(room.cut(self._reader.texts.text(prompt.text, prompt_name), side), framed)
        elif isinstance(prompt, PairPrompt):
            prompt = PairPrompt(*room.cut_pair(prompt.first, prompt.second, side))
        reads_end = keep is not None and side == "left"
        found = await self._ids_of(prompt, max_model_len, None if reads_end else max_model_len)
        frame = self._tokenizer.frame if framed else ([], [])
        token_ids = prompt_limits.truncate_framed(found.token_ids, request, max_model_len, frame)
        lost = len(found.token_ids) - len(token_ids) if reads_end else 0
        second = max(found.second_text_from - lost, len(frame[0])) if found.second_text_from else 0
        types = self._reader.token_types and second < len(token_ids)
        return Tokenized(token_ids, second if types else 0)

    async def _read_late(self, prompt: LatePrompt, late: LateTexts, max_model_len: int) -> Tokenized:
        """What is too long is cut, as the model was trained."""
        room = Room(late.room(is_query=prompt.is_query), self._tokenizer.longest_token)
        text = TextPrompt(room.cut(self._reader.texts.text(prompt.text, "")), add_special_tokens=False)
        found = await self._ids_of(text, max_model_len, room.max_model_len)
        return late.read(found.token_ids, is_query=prompt.is_query)

    async def tokenize(self, prompt: Prompt, max_model_len: int) -> list[int]:
        """What Tokenize answers; `max_model_len`: 0 while nobody knows it."""
        return list((await self._ids_of(prompt, max_model_len)).token_ids)

    async def _ids_of(self, prompt: Prompt, max_model_len: int, enough: int | None = None) -> Tokenized:
        self._check_characters(prompt, max_model_len)
        match prompt:
            case TokenPrompt(token_ids):
                return Tokenized(list(token_ids))
            case PairPrompt(first, second):
                return await self._tokenizer.encode_pair(first, second, enough)
            case TextPrompt(text, framed):
                return Tokenized(await self._tokenizer.encode_prompt(text, add_special_tokens=framed, enough=enough))
            case ChatPrompt():
                return Tokenized(await self._tokenizer.encode_chat(prompt, enough))

    def _check_characters(self, prompt: Prompt, max_model_len: int) -> None:
        """`max_model_len`: 0 while nobody knows it."""
        if not isinstance(prompt, TokenPrompt):
            prompts.check_characters(prompt, Room(max_model_len, self._tokenizer.longest_token))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        prompt_limits.check_vocabulary(token_ids, self._vocab_size)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def detokenize_long(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The same; hundreds of thousands of ids hold up nobody."""
        for start in range(0, len(token_ids), IDS_IN_A_TURN):
            prompt_limits.check_vocabulary(token_ids[start : start + IDS_IN_A_TURN], self._vocab_size)
            await asyncio.sleep(0)
        return await self._tokenizer.decode_long(token_ids, skip_special_tokens=skip_special_tokens)


def _adapter(request: Request, limits: ClusterLimits) -> AdapterId | None:
    """That `model` names; None: the model itself. Raises NotFound."""
    if not request.adapter:
        return None
    if request.adapter not in limits.adapters:
        raise NotFound(f"The model `{request.adapter}` does not exist.", field="model")
    return AdapterId(request.adapter, limits.adapters[request.adapter])


def _work(
    request: Request, token_ids: Sequence[int], root_hash: bytes, asked: PromptOptions, adapter: AdapterId | None
) -> Work:
    column = i32_bytes(token_ids)
    return Work(
        request_id=request.request_id,
        traceparent=request.traceparent,
        prompt=column,
        num_prompt_tokens=len(token_ids),
        hashes=PromptHashes(root_hash, column),
        sampling=asked.sampling,
        eos_token_ids=asked.eos_token_ids,
        params=asked.params,
        grammar=asked.grammar,
        samples_nothing=asked.samples_nothing,
        priority=request.priority,
        kv_priority=request.kv_priority,
        tenant=request.tenant,
        arrival_s=request.arrival_s,
        deadline_s=request.deadline_s,
        adapter=adapter,
    )


def _check_priority(priority: int, limits: ClusterLimits) -> None:
    without = limits.scheduling_policies & WITHOUT_PRIORITY
    if priority and without:
        policy = " and ".join(sorted(policy or "unknown" for policy in without))
        text = f"priority needs the scheduling policy 'priority'; the schedulers' policy is {policy}"
        raise Unimplemented(text, field="priority")


def _estimate(prompt: Prompt) -> int:
    match prompt:
        case TokenPrompt(token_ids):
            return len(token_ids)
        case TextPrompt(text):
            return len(text) // CHARACTERS_PER_TOKEN + 1
        case PairPrompt(first, second):
            return (len(first) + len(second)) // CHARACTERS_PER_TOKEN + 1
        case ChatPrompt(messages):
            return sum(len(str(m.get("content") or "")) for m in messages) // CHARACTERS_PER_TOKEN + 1
