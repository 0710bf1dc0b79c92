"""Converts messages of the pooling methods (embed, classify, score, rerank) to requests, and results to messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.grpc_edge import conversations
from quire.services.frontend.grpc_edge.requests import Arrival, new_request
from quire.services.frontend.grpc_edge.responses import usage_of
from quire.services.frontend.input_processor.pooling import pooling
from quire.services.frontend.input_processor.pooling.scoring import ScoredInput, Scoring, probabilities
from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.services.frontend.request.request import Pooling, Prompt, Request, Sampling, TextPrompt, TokenPrompt
from quire.shared.columns import u32_bytes
from quire.shared.errors import InvalidArgument
from quire.shared.media.modalities import IMAGE, VIDEO
from quire.shared.pb.inference.v1 import inference_pb2 as pb

POOLERS = {number: name for name, number in pooling.POOLERS.items()}


def embed_request(message: pb.EmbedRequest, arrival: Arrival) -> Request:
    """Returns the pooling request of an Embed message, one prompt per input. Raises InvalidArgument for an unknown
    pooler and invalid inputs or options."""
    params = message.pooling
    if params.pooler not in POOLERS:
        raise InvalidArgument(f"pooler: {params.pooler} is not a value of Pooler", field="pooler")
    pooling_params = Pooling(
        POOLERS[params.pooler],
        params.normalize if params.HasField("normalize") else None,
        params.dimensions or None,
        params.classify,
        params.step_tag_id if params.HasField("step_tag_id") else None,
        message.prompt_name,
    )
    prompts = _prompts(message.inputs, framed=not message.skip_special_prompt_tokens)
    request = _request(message.model, prompts, pooling_params, message.options, arrival)
    return replace(request, media_options=conversations.options_of_media(message.media_options))


def classify_request(message: pb.ClassifyRequest, arrival: Arrival) -> Request:
    prompts = _prompts(message.inputs, framed=not message.skip_special_prompt_tokens)
    return _request(message.model, prompts, Pooling(classify=True), message.options, arrival)


def score_request(message: pb.ScoreRequest | pb.RerankRequest, scoring: Scoring, arrival: Arrival) -> Request:
    return _request(message.model, scoring.prompts, scoring.pooling, message.options, arrival)


def _request(
    model: str, prompts: Sequence[Prompt], pooling_params: Pooling, options: pb.RequestOptions, arrival: Arrival
) -> Request:
    """Returns a pooling request with several prompts, whose results are delivered whole; a prompt that is too long
    loses its end by default."""
    request = new_request(model, prompts[0], Sampling(detokenize=False), options, arrival)
    side = options.truncation_side or "right"
    return replace(request, prompts=prompts, pooling=pooling_params, truncation_side=side, final_only=True)


def _prompts(inputs: Iterable[pb.EmbedInput], *, framed: bool) -> list[Prompt]:
    """Returns the prompts of the inputs. `framed`: with the tokenizer's special tokens. Raises InvalidArgument if there
    is none."""
    prompts = [_prompt(one, framed=framed) for one in inputs]
    if not prompts:
        raise InvalidArgument("inputs must contain at least one input", field="inputs")
    return prompts


def _prompt(one: pb.EmbedInput, *, framed: bool) -> Prompt:
    """Returns the prompt of one input: a text or token ids, with media for their placeholders, or media alone. Raises
    InvalidArgument for an empty one."""
    match one.WhichOneof("input"):
        case "text":
            return TextPrompt(one.text, framed, _media(one))
        case "token_ids":
            return TokenPrompt(one.token_ids.ids, _media(one))
        case _ if one.images or one.videos:
            return TextPrompt("", framed, _media(one))
        case _:
            raise InvalidArgument("inputs: each must be text or token ids", field="inputs")


def _media(one: pb.EmbedInput) -> list[MediaPart]:
    """Returns the media of an input."""
    given = ((IMAGE, "images", one.images), (VIDEO, "videos", one.videos))
    return [
        conversations.media_part(part, PartOrigin(f"inputs: {field}", modality, "inputs"), modality)
        for modality, field, parts in given
        for part in parts
    ]


def scored_documents(message: pb.ScoreRequest | pb.RerankRequest) -> Sequence[ScoredInput]:
    """Returns the documents of a message. Raises InvalidArgument for texts beside contents, and for empty parts."""
    if not message.contents:
        return message.documents
    if message.documents:
        raise InvalidArgument("contents: documents are given as well; send one of both", field="contents")
    return [conversations.user_content(content.parts) for content in message.contents]


def embed_response(request_id: str, generation: Generation) -> pb.EmbedResponse:
    """Returns all vectors of a finished generation, with the number of rows of each if the model gives one per
    token."""
    return pb.EmbedResponse(
        request_id=request_id,
        vectors=generation.vectors,
        usage=usage_of(generation.usage),
        num_rows=u32_bytes(generation.num_vectors or ()),
    )


def embed_part(request_id: str, generation: Generation, index: int, *, is_last: bool) -> pb.EmbedStreamResponse:
    """Returns the message for the finished input `index`. `is_last`: it also carries the usage."""
    return pb.EmbedStreamResponse(
        request_id=request_id,
        index=index,
        vector=generation.vector(index),
        num_rows=generation.prepared[index].num_vectors or 0,
        usage=usage_of(generation.usage) if is_last else None,
    )


def classify_response(request_id: str, generation: Generation, classes: Sequence[str]) -> pb.ClassifyResponse:
    """Returns the probabilities of each input and the most likely label. `classes`: labels in the order of the model's
    outputs."""
    found = [probabilities(vector) for vector in generation.vectors]
    return pb.ClassifyResponse(
        request_id=request_id,
        classifications=[
            pb.Classification(label=classes[int(np.argmax(probs))], probabilities=probs.tolist()) for probs in found
        ],
        usage=usage_of(generation.usage),
    )


def score_response(request_id: str, generation: Generation, scoring: Scoring) -> pb.ScoreResponse:
    scores = scoring.scores(generation.vectors)
    return pb.ScoreResponse(request_id=request_id, scores=scores, usage=usage_of(generation.usage))


def rerank_response(request_id: str, generation: Generation, scoring: Scoring, top_n: int) -> pb.RerankResponse:
    results = [pb.Ranked(index=index, score=score) for index, score in scoring.rank(generation.vectors, top_n)]
    return pb.RerankResponse(request_id=request_id, results=results, usage=usage_of(generation.usage))
