"""Conversion of prompts to protocol requests, and of gRPC errors to QuireError."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, cast

from quire import media
from quire.params import SamplingParams
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import pooling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb

Given = TypeVar("Given")
Plain = str | Sequence[int]


class DictPrompt(TypedDict, total=False):
    """A prompt in vLLM's form: exactly one of the first two keys."""

    prompt: str
    prompt_token_ids: Sequence[int]
    cache_salt: str  # prefixes are shared only with prompts of the same salt
    # By modality, one item or a list: {"image": Pillow's images, arrays, paths, URLs or bytes; "video": arrays of
    # frames, lists of pictures, (frames, metadata), paths, URLs or bytes; "audio": arrays, pairs of an array and its
    # sampling rate, paths, URLs or bytes}
    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Any]  # names of these items, or of items that were sent before
    mm_processor_kwargs: Mapping[str, Any]  # options of the model's media processor
    # Encoder-decoder models, in the place of the first two keys: what the encoder gets, a text, token ids, or a dict
    # with the keys above, and what the decoder continues; None: the token with which it starts
    encoder_prompt: str | Sequence[int] | Mapping[str, Any]
    decoder_prompt: str | Sequence[int] | Mapping[str, Any] | None


Prompt = Plain | DictPrompt
Scored = str | Mapping[str, Any]
"""A document to score: a text, or {"content": [parts]} with parts of a message."""
Params = SamplingParams | Sequence[SamplingParams | None] | None
"""One set of sampling parameters for all prompts, or one per prompt."""
ChatMessages = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's form: role and content (text, or parts with text and pictures), and optionally name, tool_calls,
tool_call_id, reasoning."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Model, identity, priority and cache sharing of a request."""

    request_id: str = ""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    final_only: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str = ""
    stream_interval: int = 0
    kv_priority: str = ""  # retention of the prompt in host memory and on disk: low, normal or high
    model: str = ""  # name of the model or an adapter; empty: the model
    resumable: bool = False  # the stream continues without its reader; attach(request_id, offset) resumes reading
    retention_s: float = 0.0  # without a reader, and after its end; 0: the server's maximum

    def to_proto(self) -> pb.RequestOptions:
        """Converts to the message; `model`, `resumable` and `retention_s` are fields of the requests instead."""
        return pb.RequestOptions(
            request_id=self.request_id,
            priority=self.priority,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            final_only=self.final_only,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            stream_interval=self.stream_interval,
            kv_priority=self.kv_priority,
        )


EachOptions = RequestOptions | Sequence[RequestOptions] | None
"""One set of request options for all prompts, or one per prompt."""


def final_only_options(options: RequestOptions | None) -> RequestOptions:
    """Returns options for one message per sample."""
    return replace(options or RequestOptions(), final_only=True)


def plain(prompt: Prompt) -> Plain:
    """Returns the prompt's text or token ids; ids are preferred if a dictionary has both. Raises InvalidArgument for
    unknown keys and for neither."""
    prompt, _ = separated(prompt)
    if not isinstance(prompt, Mapping):
        return prompt
    for name in prompt:
        if name not in DictPrompt.__annotations__:
            known = ", ".join(DictPrompt.__annotations__)
            raise InvalidArgument(f"prompt: the key {name!r} is not supported; available: {known}", field=str(name))
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if ids is not None:  # preferred if both are given, as in vLLM
        return ids
    if text is None:
        raise InvalidArgument("prompt: a dict needs the key prompt or prompt_token_ids", field="prompt")
    return text


def separated(prompt: Prompt) -> tuple[Prompt, Plain | None]:
    """Returns the prompt, and what the decoder continues besides it, of a prompt in vLLM's form for encoder-decoder
    models. If the encoder gets media, the decoder's prompt is the prompt with these media. Raises InvalidArgument for
    other keys beside the two."""
    if not isinstance(prompt, Mapping) or "encoder_prompt" not in prompt:
        return prompt, None
    if others := sorted(set(prompt) - {"encoder_prompt", "decoder_prompt", "cache_salt"}):
        text = f"prompt: the key {others[0]!r} does not go with encoder_prompt; put it into encoder_prompt"
        raise InvalidArgument(text, field=others[0])
    given, decoder = prompt["encoder_prompt"], prompt.get("decoder_prompt")
    encoded = dict(given) if isinstance(given, Mapping) else {_key_of(given): given}
    if salt := prompt.get("cache_salt"):
        encoded["cache_salt"] = salt
    continued = None if decoder is None else plain(cast("Prompt", decoder))
    if not encoded.get("multi_modal_data") or continued is None:
        return cast("DictPrompt", encoded), continued
    kept = {name: value for name, value in encoded.items() if name not in ("prompt", "prompt_token_ids")}
    return cast("DictPrompt", {**kept, _key_of(continued): continued}), None


def _key_of(content: Plain) -> str:
    return "prompt" if isinstance(content, str) else "prompt_token_ids"


def is_single_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether the argument is one prompt rather than several."""
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))


def for_each(params: Params, count: int) -> Sequence[SamplingParams | None]:
    """Returns one entry per prompt. Raises InvalidArgument for another number."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    return one_per_prompt(params, count, "params")


def options_for_each(options: EachOptions, count: int) -> Sequence[RequestOptions]:
    """Returns one RequestOptions per prompt. Raises InvalidArgument for another number."""
    if options is None or isinstance(options, RequestOptions):
        return [options or RequestOptions()] * count
    return one_per_prompt(options, count, "options")


def one_per_prompt(given: Sequence[Given], count: int, name: str) -> Sequence[Given]:
    """Checks that there is one entry per prompt. Raises InvalidArgument for another number."""
    if len(given) != count:
        raise InvalidArgument(f"{name}: must have one entry for each of {count} prompts, got {len(given)}", field=name)
    return given


def generate_request(prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> pb.GenerateRequest:
    """Builds a generation request for a text or token ids; a prompt's own cache_salt overrides the options'."""
    request = pb.GenerateRequest(
        model=options.model,
        options=options.to_proto(),
        resumable=options.resumable,
        retention_s=options.retention_s,
    )
    if params is not None:
        request.sampling.CopyFrom(params.to_proto())
    prompt, decoder = separated(prompt)
    content = plain(prompt)
    if isinstance(content, str):
        request.text = content
    else:
        request.token_ids.ids.extend(content)
    if isinstance(decoder, str):
        request.decoder_text = decoder
    elif decoder is not None:
        request.decoder_token_ids.ids.extend(decoder)
    if isinstance(prompt, Mapping):
        _add_fields(request, prompt)
    return request


def _add_fields(request: pb.GenerateRequest, prompt: DictPrompt) -> None:
    """Adds the fields of a prompt besides its text or token ids. Raises InvalidArgument for a value that is no item of
    its modality."""
    if salt := prompt.get("cache_salt"):
        request.options.cache_salt = salt
    media.add_media(request, prompt.get("multi_modal_data"), prompt.get("multi_modal_uuids"))
    if options := prompt.get("mm_processor_kwargs"):
        request.media_options.processor = json.dumps(options)


class EmbedExtras(TypedDict, total=False):
    """Pooling options: fields of PoolingParams in pooling.proto."""

    pooler: str  # last, mean, cls, all or step; default: the model's own
    step_tag_id: int  # with step: token whose positions get a vector
    normalize: bool  # to length 1; default: the model's own
    dimensions: int  # number of leading elements to keep
    prompt_name: str  # name of a prompt of the model's folder


def embed_request(inputs: Sequence[Prompt], options: RequestOptions, extras: EmbedExtras) -> pb.EmbedRequest:
    """Builds a request for one pooled result per input; raises InvalidArgument for unknown extras, poolers and
    dimensions."""
    unknown = set(extras) - set(EmbedExtras.__annotations__)
    if unknown:
        raise InvalidArgument(f"unknown argument {min(unknown)!r}", field=min(unknown))
    request = pb.EmbedRequest(
        model=options.model, options=options.to_proto(), prompt_name=extras.get("prompt_name", "")
    )
    pooler = extras.get("pooler", "")
    if pooler:
        known = {name.removeprefix("POOLER_").lower(): name for name, number in pooling_pb2.Pooler.items() if number}
        if pooler not in known:
            raise InvalidArgument(f"pooler must be one of {', '.join(known)}, got {pooler!r}.", field="pooler")
        request.pooling.MergeFrom(pooling_pb2.PoolingParams(pooler=known[pooler]))
    if "step_tag_id" in extras:
        request.pooling.step_tag_id = extras["step_tag_id"]
    if "normalize" in extras:
        request.pooling.normalize = extras["normalize"]
    if (dimensions := extras.get("dimensions")) is not None:
        if not 0 < dimensions < 2**32:
            raise InvalidArgument(f"dimensions must be at least 1, got {dimensions}.", field="dimensions")
        request.pooling.dimensions = dimensions
    for prompt in inputs:
        _add_input(request, prompt)
    return request


def _add_input(request: pb.EmbedRequest, prompt: Prompt) -> None:
    """Adds one input with its pictures and videos. Raises InvalidArgument for a value that is no item of its modality,
    and for options of the media processor that differ from an earlier input's."""
    added, content = request.inputs.add(), plain(prompt)
    if isinstance(content, str):
        added.text = content
    else:
        added.token_ids.ids.extend(content)
    if not isinstance(prompt, Mapping):
        return
    media.add_embed_media(added, prompt.get("multi_modal_data"), prompt.get("multi_modal_uuids"))
    options = json.dumps(prompt.get("mm_processor_kwargs") or {})
    before = request.media_options.processor or "{}"
    if len(request.inputs) > 1 and options != before:
        text = "mm_processor_kwargs: all inputs of a call must have the same; make a call for each"
        raise InvalidArgument(text, field="mm_processor_kwargs")
    if options != "{}":
        request.media_options.processor = options


def classify_request(inputs: Sequence[Prompt], options: RequestOptions) -> pb.ClassifyRequest:
    return pb.ClassifyRequest(
        inputs=embed_request(inputs, RequestOptions(), {}).inputs, model=options.model, options=options.to_proto()
    )


def rerank_request(query: str, documents: Sequence[Scored], top_n: int, options: RequestOptions) -> pb.RerankRequest:
    request = pb.RerankRequest(query=query, top_n=top_n, model=options.model, options=options.to_proto())
    _add_documents(request, documents)
    return request


def score_request(
    queries: str | Sequence[str], documents: Scored | Sequence[Scored], options: RequestOptions
) -> pb.ScoreRequest:
    """Builds a request for scores; a single text or content counts as a list of one."""
    request = pb.ScoreRequest(
        queries=[queries] if isinstance(queries, str) else queries, model=options.model, options=options.to_proto()
    )
    _add_documents(request, [documents] if isinstance(documents, (str, Mapping)) else documents)
    return request


def _add_documents(request: pb.ScoreRequest | pb.RerankRequest, documents: Sequence[Scored]) -> None:
    """Adds documents as texts, or all of them as contents if one has parts. Raises InvalidArgument for objects without
    `content`."""
    if all(isinstance(one, str) for one in documents):
        request.documents.extend(str(one) for one in documents)
        return
    for one in documents:
        content: Any = [one] if isinstance(one, str) else one.get("content")
        if not isinstance(content, Sequence) or isinstance(content, str):
            text = 'documents: each must be a text, or {"content": [parts]} with texts and pictures'
            raise InvalidArgument(text, field="documents")
        request.contents.add(parts=media.content_parts(content))


class ChatExtras(TypedDict, total=False):
    """Additional options of a chat: fields of ChatRequest in inference.proto."""

    tools: Sequence[Mapping[str, Any]]  # in OpenAI's format
    tool_choice: str | Mapping[str, Any]  # none, auto, required, or a function as OpenAI names it
    parallel_tool_calls: bool
    include_reasoning: bool
    reasoning_effort: str
    chat_template_kwargs: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]  # options of the model's media processor
    media_io_kwargs: Mapping[str, Any]  # {"image": {"image_mode": ...}, "video": {"num_frames": ..., "fps": ...}}


def chat_request(
    messages: ChatMessages, params: SamplingParams | None, options: RequestOptions, extras: ChatExtras
) -> pb.ChatRequest:
    """Builds a chat request from messages, tools and choices in OpenAI's form; raises InvalidArgument for unknown
    extras."""
    unknown = set(extras) - set(ChatExtras.__annotations__)
    if unknown:
        raise InvalidArgument(f"unknown argument {min(unknown)!r}", field=min(unknown))
    request = pb.ChatRequest(
        model=options.model,
        options=options.to_proto(),
        messages=[_chat_message(message) for message in messages],
        tools=[_tool(tool) for tool in extras.get("tools", ())],
        tool_choice=_tool_choice(extras["tool_choice"]) if "tool_choice" in extras else None,
        parallel_tool_calls=extras.get("parallel_tool_calls"),
        include_reasoning=extras.get("include_reasoning"),
        reasoning_effort=extras.get("reasoning_effort", ""),
        chat_template_kwargs=json.dumps(extras.get("chat_template_kwargs", {})),
        resumable=options.resumable,
        retention_s=options.retention_s,
    )
    if params is not None:
        request.sampling.CopyFrom(params.to_proto())
    if processor := extras.get("mm_processor_kwargs"):
        request.media_options.processor = json.dumps(processor)
    if io := extras.get("media_io_kwargs"):
        request.media_options.io = json.dumps(io)
    return request


def _chat_message(message: Mapping[str, Any]) -> pb.ChatMessage:
    """Converts a message in OpenAI's form; KeyError if its role or a call's function is missing."""
    calls = [
        pb.ToolCall(
            id=call.get("id", ""), name=call["function"]["name"], arguments=_json_text(call["function"]["arguments"])
        )
        for call in message.get("tool_calls") or ()
    ]
    content = message.get("content") or ""
    return pb.ChatMessage(
        role=message["role"],
        content=content if isinstance(content, str) else "",
        parts=[] if isinstance(content, str) else media.content_parts(content),
        name=message.get("name", ""),
        tool_calls=calls,
        tool_call_id=message.get("tool_call_id", ""),
        reasoning=message.get("reasoning", ""),
    )


def _tool(tool: Mapping[str, Any]) -> pb.Tool:
    """Converts a function tool in OpenAI's form; parameters are passed on as JSON text."""
    function = tool["function"]
    return pb.Tool(
        name=function["name"],
        description=function.get("description", ""),
        parameters=_json_text(function.get("parameters", {})),
        strict=function.get("strict", False),
    )


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _tool_choice(choice: str | Mapping[str, Any]) -> pb.ToolChoice:
    """Converts none, auto, required or a function's name; raises InvalidArgument for another text."""
    if not isinstance(choice, str):
        return pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED, name=choice["function"]["name"])
    modes = {"none": pb.ToolChoice.MODE_NONE, "auto": pb.ToolChoice.MODE_AUTO, "required": pb.ToolChoice.MODE_REQUIRED}
    if choice not in modes:
        text = f"tool_choice must be none, auto, required or a function, got {choice!r}"
        raise InvalidArgument(text, field="tool_choice")
    return pb.ToolChoice(mode=modes[choice])
