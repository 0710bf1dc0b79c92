"""Converts messages of the public protocol to requests."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.services.frontend.calls.calls import Call
from quire.services.frontend.grpc_edge import conversations
from quire.services.frontend.grpc_edge.errors import Context
from quire.services.frontend.input_processor.sampling import sampling_rules
from quire.services.frontend.request import conversation, reasoning
from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.services.frontend.request.request import (
    BeamSearch,
    Prompt,
    RepetitionDetection,
    Request,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.shared.errors import InvalidArgument
from quire.shared.media.modalities import AUDIO, IMAGE, VIDEO
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Arrival:
    """Arrival time and deadline of a call (event loop clock, seconds), and the tenant of its metadata."""

    arrival_s: float
    deadline_s: float | None
    tenant: str = ""


def arrival_of(context: Context) -> Arrival:
    """Returns the arrival of a call at the present time, with its gRPC deadline and its x-tenant metadata."""
    now = asyncio.get_running_loop().time()
    remaining_s = context.time_remaining()
    metadata = dict(context.invocation_metadata() or ())
    return Arrival(now, None if remaining_s is None else now + remaining_s, str(metadata.get("x-tenant", "")))


def detached_arrival() -> Arrival:
    """Returns the arrival of a request without a call."""
    return Arrival(asyncio.get_running_loop().time(), None)


def tenant(claimed: str, arrival: Arrival, call: Call) -> str:
    """Returns the tenant of the API key, or, without keys, the one that the message or metadata states."""
    return claimed or arrival.tenant if call.caller is None else call.caller.tenant


def generate_request(message: pb.GenerateRequest, arrival: Arrival, defaults: GenerationDefaults) -> Request:
    """Returns the request of a Generate message. `defaults`: the model's sampling defaults. Raises InvalidArgument."""
    _check_retention(message)
    sampling = _sampling(message.sampling, defaults)
    request = new_request(message.model, _prompt(message), sampling, message.options, arrival)
    if not message.HasField("media_options"):
        return request
    return replace(request, media_options=conversations.options_of_media(message.media_options))


def chat_request(message: pb.ChatRequest, arrival: Arrival, defaults: GenerationDefaults) -> Request:
    """Returns the request of a Chat message, whose answer is parsed for reasoning and tool calls. `defaults`: the
    model's sampling defaults. Raises InvalidArgument for invalid messages, tools, sampling parameters and media
    options."""
    _check_retention(message)
    offer = conversations.tool_offer(message)
    variables = reasoning.template_variables(message.reasoning_effort or None)
    prompt = conversation.chat_prompt(
        conversations.messages(message.messages),
        template_variables={**variables, **conversations.variables(message.chat_template_kwargs)},
        tools=offer.template_tools,
    )
    request = new_request(message.model, prompt, _sampling(message.sampling, defaults), message.options, arrival)
    wants_reasoning = not message.HasField("include_reasoning") or message.include_reasoning
    return replace(
        request,
        parse_answer=True,
        tool_use=offer.tool_use,
        include_reasoning=wants_reasoning,
        media_options=conversations.options_of_media(message.media_options),
    )


def _check_retention(message: pb.GenerateRequest | pb.ChatRequest) -> None:
    """Raises InvalidArgument for a retention of a request that is not resumable."""
    if message.retention_s and not message.resumable:
        raise InvalidArgument(f"retention_s={message.retention_s:g} requires resumable=true", field="retention_s")


def tokenize_prompt(message: pb.TokenizeRequest) -> Prompt:
    return _prompt(message)


def new_request(
    model: str, prompt: Prompt, sampling: Sampling, options: pb.RequestOptions, arrival: Arrival
) -> Request:
    """Returns a request with one prompt and the common options; an id is generated if the message has none. A
    max_tokens beyond the context is refused."""
    return Request(
        request_id=options.request_id or uuid.uuid4().hex,
        model=model,
        prompts=(prompt,),
        sampling=sampling,
        arrival_s=arrival.arrival_s,
        deadline_s=arrival.deadline_s,
        priority=options.priority,
        tenant=options.tenant or arrival.tenant,
        cache_salt=options.cache_salt,
        kv_priority=options.kv_priority or "normal",
        truncate_prompt_tokens=options.truncate_prompt_tokens if options.HasField("truncate_prompt_tokens") else None,
        truncation_side=options.truncation_side or "left",
        final_only=options.final_only,
        stream_interval=max(1, options.stream_interval),
        return_times=options.return_times,
        strict_length=True,
    )


def _prompt(message: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    """Returns the prompt: a text, a conversation, or, for Generate only, token ids. Raises InvalidArgument if it is not
    set."""
    media = _media(message)
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text, not message.skip_special_prompt_tokens, media, _decoder(message))
        case "conversation":
            if media:
                field = media[0].origin.field
                raise InvalidArgument(f"{field}: a conversation has its media in parts of messages", field=field)
            turns = conversations.messages(message.conversation.messages)
            return conversation.chat_prompt(turns, tools=conversations.shown_tools(message.conversation.tools))
        case "token_ids" if isinstance(message, pb.GenerateRequest):
            return TokenPrompt(message.token_ids.ids, media, _decoder(message))
        case _:
            raise InvalidArgument("prompt must be set", field="prompt")


def _decoder(message: pb.GenerateRequest | pb.TokenizeRequest) -> str | Sequence[int] | None:
    """Returns what the decoder of an encoder-decoder model continues; None if the message does not say."""
    kind = message.WhichOneof("decoder_prompt") if isinstance(message, pb.GenerateRequest) else None
    if kind is None:
        return None
    assert isinstance(message, pb.GenerateRequest)
    return message.decoder_text if kind == "decoder_text" else message.decoder_token_ids.ids


def _media(message: pb.GenerateRequest | pb.TokenizeRequest) -> list[MediaPart]:
    """Returns the media of a prompt that is no conversation."""
    if isinstance(message, pb.TokenizeRequest):
        return []
    given = (
        (IMAGE, "images", message.images),
        (VIDEO, "videos", message.videos),
        (AUDIO, "audios", message.audios),
    )
    return [
        conversations.media_part(part, PartOrigin(f"{field}: parts", modality, field), modality)
        for modality, field, parts in given
        for part in parts
    ]


def _sampling(message: sampling_pb2.SamplingParams, defaults: GenerationDefaults) -> Sampling:
    """Returns sampling parameters; only fields that the client set override the defaults."""
    fields = {descriptor.name: value for descriptor, value in message.ListFields()}
    return sampling_rules.build({name: _plain(value) for name, value in fields.items()}, defaults)


def _plain(value: Any) -> Any:
    """Returns a protobuf value as a Python type: lists as tuples, nested messages as values of Sampling. A 32-bit float
    becomes the shortest decimal that its sender may have meant."""
    if isinstance(value, float):
        return float(str(np.float32(value)))
    if isinstance(value, sampling_pb2.RepetitionDetection):
        return RepetitionDetection(value.max_pattern_size, value.min_count, value.min_pattern_size or 1)
    if isinstance(value, (sampling_pb2.BeamSearch, sampling_pb2.NamedTokens)):
        return _plain_message(value)
    if isinstance(value, MutableMapping):
        return dict(value)
    if isinstance(value, MutableSequence):
        return tuple(map(_plain, value))
    return value


def _plain_message(value: sampling_pb2.BeamSearch | sampling_pb2.NamedTokens) -> Any:
    """Returns a nested message as the type that Sampling uses: a tuple of ids, or the beam search."""
    if isinstance(value, sampling_pb2.NamedTokens):
        return tuple(value.ids)
    penalty = _plain(value.length_penalty) if value.HasField("length_penalty") else 1.0
    return BeamSearch(value.width, penalty, value.early_stopping)
