"""Routes of POST /v1/embeddings, /pooling, /classify, /score, /rerank and their versions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from fastapi import Request
from starlette.responses import Response

from quire.services.frontend.http import headers
from quire.services.frontend.http.responses import GenerationResponse
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.serving_context import ServingContext
from quire.services.frontend.input_processor.pooling import pooling
from quire.services.frontend.input_processor.pooling.scoring import ScoredInput, Scoring
from quire.services.frontend.openai_edge.answers.pooling_formats import (
    ClassifyFormat,
    EmbeddingFormat,
    PooledFormat,
    PoolingFormat,
    RerankFormat,
    ScoreFormat,
)
from quire.services.frontend.openai_edge.body.bodies import (
    FIRST,
    SECOND,
    ClassifyBody,
    EmbeddingBody,
    InputBody,
    PooledBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from quire.services.frontend.openai_edge.body.prompts import chat_prompt, completion_prompts
from quire.services.frontend.openai_edge.body.scored_inputs import read_scored_input, read_scored_inputs
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.media import DEFAULT_MEDIA_OPTIONS, MediaOptions
from quire.services.frontend.request.media_options import media_options
from quire.services.frontend.request.request import Pooling, Prompt, Sampling
from quire.services.frontend.request.request import Request as GeneratorRequest
from quire.shared.errors import InvalidArgument, Unimplemented

EMBEDDINGS, POOLING, CLASSIFY = "/v1/embeddings", "/pooling", "/classify"
SCORE = ("/score", "/v1/score")
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")


class PoolingRoutes:
    """Routes that turn texts and conversations into vectors, classes and scores."""

    def __init__(self, context: ServingContext) -> None:
        self._generator = context.generator
        self._processor = context.processor
        self._catalogue = context.catalogue
        self._unknown = context.bounds.unknown_fields
        self.router = Router(tags=["pooling"], route_class=context.bounds.route())
        self.router.add_api_route(EMBEDDINGS, self.embed, methods=["POST"], response_class=Response)
        self.router.add_api_route(POOLING, self.pool, methods=["POST"], response_class=Response)
        self.router.add_api_route(CLASSIFY, self.classify, methods=["POST"], response_class=Response)
        for path in SCORE:
            self.router.add_api_route(path, self.score, methods=["POST"], response_class=Response)
        for path in RERANK:
            self.router.add_api_route(path, self.rerank, methods=["POST"], response_class=Response)

    @property
    def classifies(self) -> bool:
        """Whether the model classifies texts and has no vectors."""
        return bool(self._processor.classes)

    async def embed(self, body: EmbeddingBody, http: Request) -> Response:
        """Returns one vector for each input, a text or token ids. Raises InvalidArgument for poolers that give
        several vectors per input."""
        body.refuse_unknown(self._unknown)
        if body.pooler in (pooling.ALL, pooling.STEP):
            raise InvalidArgument(f"pooler: {body.pooler} returns several vectors; use /pooling", field="pooler")
        pooling_options = Pooling(
            body.pooler or "", _normalize(body), body.dimensions, prompt_name=body.prompt_name or ""
        )
        request = pooling_request(body, _prompts(body), pooling_options, headers.read(http))
        return self._answer(
            request,
            EmbeddingFormat(self._catalogue.served_name(body.model), as_base64=body.encoding_format == "base64"),
        )

    async def pool(self, body: PoolingBody, http: Request) -> Response:
        """Returns a vector for each input: of its hidden states, or a classifier's raw scores."""
        body.refuse_unknown(self._unknown)
        task = body.task or ("classify" if self._processor.classes else "embed")
        by_token = task.startswith("token_") or (task == "embed" and self._processor.is_late_interaction)
        pooler = body.pooler or (pooling.ALL if by_token else "")
        classify, name = task.endswith("classify"), body.prompt_name or ""
        if classify and body.use_activation:
            raise Unimplemented(
                "use_activation is not supported for scores; /classify gives them as probabilities",
                field="use_activation",
            )
        pooling_options = Pooling(pooler, _normalize(body), body.dimensions, classify, body.step_tag_id, name)
        request = pooling_request(body, _prompts(body), pooling_options, headers.read(http))
        return self._answer(
            request, PoolingFormat(self._catalogue.served_name(body.model), as_base64=body.encoding_format == "base64")
        )

    async def classify(self, body: ClassifyBody, http: Request) -> Response:
        """Returns the probability of each of the model's classes for each input."""
        body.refuse_unknown(self._unknown)
        request = pooling_request(body, _prompts(body), Pooling(classify=True), headers.read(http))
        return self._answer(request, ClassifyFormat(self._catalogue.served_name(body.model), self._processor.classes))

    async def score(self, body: ScoreBody, http: Request) -> Response:
        """Scores how well pairs of texts match; one first text is paired with all second texts."""
        body.refuse_unknown(self._unknown)
        queries = _one_of(body, *FIRST, has_several=False)
        scoring = self._processor.scoring(queries, _one_of(body, *SECOND, has_several=True))
        return self._scored(body, scoring, ScoreFormat(self._catalogue.served_name(body.model), scoring), http)

    async def rerank(self, body: RerankBody, http: Request) -> Response:
        """Ranks documents by how well they answer the query, best first, and returns the top_n (all by default)."""
        body.refuse_unknown(self._unknown)
        documents = read_scored_inputs(body.documents, "documents")
        scoring = self._processor.scoring([read_scored_input(body.query, "query")], documents)
        answer_format = RerankFormat(
            self._catalogue.served_name(body.model), scoring, body.top_n or 0, shows_documents=body.return_documents
        )
        return self._scored(body, scoring, answer_format, http)

    def _scored(self, body: PooledBody, scoring: Scoring, answer_format: PooledFormat, http: Request) -> Response:
        return self._answer(pooling_request(body, scoring.prompts, scoring.pooling, headers.read(http)), answer_format)

    def _answer(self, request: GeneratorRequest, answer_format: PooledFormat) -> Response:
        return GenerationResponse(self._generator, request, answer_format, stream=False)


def _prompts(body: InputBody) -> list[Prompt]:
    """Returns the prompts of `input`, or the one of `messages`."""
    if body.messages is not None:
        return [chat_prompt(body, body.messages, {}, ())]
    return completion_prompts(body.input, add_special_tokens=body.add_special_tokens is not False)


def _normalize(body: EmbeddingBody) -> bool | None:
    """Returns whether vectors are normalized, None for the model's default. `use_activation` is an alias; raises
    InvalidArgument if both are set and differ."""
    if body.normalize is not None and body.use_activation not in (None, body.normalize):
        raise InvalidArgument(
            "use_activation is another name of normalize and must not contradict it", field="use_activation"
        )
    return body.use_activation if body.normalize is None else body.normalize


def _one_of(body: ScoreBody, *names: str, has_several: bool) -> Sequence[ScoredInput]:
    """Returns what is under the one name of the field that is set; raises InvalidArgument unless exactly one is. A
    single text or content becomes a list. `has_several`: as in read_scored_inputs()."""
    given = [(name, value) for name in names if (value := getattr(body, name)) is not None]
    if len(given) != 1:
        text = f"exactly one of {', '.join(names[:-1])} and {names[-1]} must be given"
        raise InvalidArgument(text, field=names[0])
    ((name, found),) = given
    return read_scored_inputs(found, name, has_several=has_several)


def pooling_request(
    body: PooledBody, prompts: Sequence[Prompt], pooling: Pooling, call: CallHeaders
) -> GeneratorRequest:
    """Returns a request that pools its prompts; nothing is sampled, and prompts are truncated on the right by
    default."""
    return GeneratorRequest(
        request_id=body.request_id or call.request_id or uuid.uuid4().hex,
        model=body.model,
        prompts=prompts,
        sampling=Sampling(detokenize=False),
        pooling=pooling,
        arrival_s=call.arrival_s,
        deadline_s=call.deadline_s,
        priority=body.priority or 0,
        tenant=body.tenant or call.tenant,
        cache_salt=body.cache_salt or "",
        kv_priority=body.kv_priority,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "right",
        final_only=True,
        media_options=_media_options(body),
    )


def _media_options(body: PooledBody) -> MediaOptions:
    """Returns the options of the pictures of a body, which only an InputBody has."""
    if not isinstance(body, InputBody):
        return DEFAULT_MEDIA_OPTIONS
    return media_options(body.mm_processor_kwargs, body.media_io_kwargs)
