"""Converts bodies of Ollama's API to requests."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.http.fields import scalar_fields
from quire.services.frontend.input_processor.sampling import sampling_rules
from quire.services.frontend.ollama_edge.bodies import (
    OPTION_NAMES,
    ROLES,
    AnswerBody,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    Options,
)
from quire.services.frontend.openai_edge.body import tools
from quire.services.frontend.request import conversation, reasoning
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.services.frontend.request.request import ChatPrompt, Pooling, Prompt, Request, Sampling, TextPrompt
from quire.services.frontend.request.tool_offer import ToolOffer
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.shared.errors import InvalidArgument
from quire.shared.media.audio.decoding import is_sound_file
from quire.shared.media.modalities import AUDIO, IMAGE, VIDEO
from quire.shared.pb.common.v1 import sampling_pb2

UNBOUNDED = (-1, -2)  # values of num_predict
BASE64_HEAD = 24  # characters of 18 bytes, more than is_sound_file() reads


def chat_request(body: OllamaChatBody, headers: CallHeaders, defaults: GenerationDefaults) -> Request:
    offer = tools.read(body.tools or None, None, parallel=True)
    return _request(body, _conversation(body, offer), offer, headers, defaults)


def _conversation(body: OllamaChatBody, offer: ToolOffer) -> ChatPrompt:
    """Returns the chat prompt; a last message of the assistant is continued unless it has tool calls."""
    written = [_message(message) for message in body.messages]
    is_continued = written[-1]["role"] == "assistant" and not written[-1].get("tool_calls")
    return conversation.chat_prompt(
        written,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        template_variables=_variables(body),
        tools=offer.template_tools,
    )


def generate_request(body: OllamaGenerateBody, headers: CallHeaders, defaults: GenerationDefaults) -> Request:
    """Returns the request for a prompt, rendered as a conversation of one turn unless it is raw. Raises InvalidArgument
    for a system text with a raw prompt."""
    if not body.raw:
        media = _media(body.images, body.videos)
        turns = [conversation.message("user", _content(body.prompt, media))]
        if body.system:
            turns.insert(0, conversation.message("system", body.system))
        prompt: Prompt = conversation.chat_prompt(turns, template_variables=_variables(body))
    elif body.system:
        raise InvalidArgument(
            "system: cannot be combined with raw=true, which uses no template; put it into the prompt", field="system"
        )
    else:
        prompt = TextPrompt(body.prompt, media=_media(body.images, body.videos))
    return _request(body, prompt, ToolOffer(), headers, defaults)


def _request(
    body: AnswerBody, prompt: Prompt, offer: ToolOffer, headers: CallHeaders, defaults: GenerationDefaults
) -> Request:
    """Builds the request with a generated id, if the client sent none; a num_predict beyond the context is shortened.
    Raises InvalidArgument for sampling parameters out of range."""
    return Request(
        request_id=headers.request_id or uuid.uuid4().hex,
        model=body.model_name,
        prompts=(prompt,),
        sampling=sampling_rules.build(_given(body), defaults),
        arrival_s=headers.arrival_s,
        deadline_s=headers.deadline_s,
        tenant=headers.tenant,
        final_only=not body.stream,
        parse_answer=isinstance(prompt, ChatPrompt),
        tool_use=offer.tool_use,
        include_reasoning=body.think is not False,
    )


def check_options(options: Options, defaults: GenerationDefaults) -> None:
    """Validates options of a call that does not use them. Raises InvalidArgument."""
    sampling_rules.check(sampling_rules.build(_sampling_options(options), defaults))


def _given(body: AnswerBody) -> Mapping[str, Any]:
    """Returns the sampling parameters under the common names; None for omitted ones."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return {
        **_sampling_options(body.given_options),
        "logprobs": logprobs,
        "structured_output": _structured_output(body),
    }


def _sampling_options(options: Options) -> Mapping[str, Any]:
    """Returns Ollama's options under the common names; None for omitted ones, and for a num_predict that means
    unlimited."""
    return {
        "temperature": options.temperature,
        "seed": options.seed,
        "max_tokens": None if options.num_predict in UNBOUNDED else options.num_predict,
        "stop": [options.stop] if isinstance(options.stop, str) else options.stop,
        **scalar_fields.given(options),
        **{name: getattr(options, option) for name, option in OPTION_NAMES.items()},
    }


def _structured_output(body: AnswerBody) -> sampling_pb2.StructuredOutput | None:
    """Returns the constraint of `format`: any JSON object, or a schema, which may be {}; None without one."""
    if not body.format and not isinstance(body.format, dict):
        return None
    if body.format == "json":
        return sampling_pb2.StructuredOutput(json_object=True)
    return sampling_pb2.StructuredOutput(json_schema=json.dumps(body.format))


def _variables(body: AnswerBody) -> Mapping[str, Any]:
    """Returns the template variables for `think`: an effort, or whether to think; empty if it is not given."""
    if body.think is None:
        return {}
    if isinstance(body.think, str):
        return reasoning.template_variables(body.think)
    return {"enable_thinking": body.think, "thinking": body.think}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Converts one message of a conversation. Raises InvalidArgument for an unknown role or a wrong type."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidArgument(f"messages: role must be one of {', '.join(ROLES)}, got {role!r}", field="messages")
    if content is not None and not isinstance(content, str):
        raise InvalidArgument("messages: content must be text", field="messages")
    return conversation.message(
        str(role),
        _content(content or "", _media(_list(message, "images"), _list(message, "videos"), "messages: ")),
        name=_text(message, "tool_name"),
        tool_calls=[_call(number, call) for number, call in enumerate(_list(message, "tool_calls"))],
        tool_call_id=_text(message, "tool_call_id"),
        reasoning=_text(message, "thinking"),
    )


def _content(text: str, media: Sequence[MediaPart]) -> str | list[Mapping[str, Any]]:
    """Returns a text, or pictures and videos before it."""
    if not media:
        return text
    parts: list[Mapping[str, Any]] = [conversation.content_part(one) for one in media]
    return [*parts, {"type": "text", "text": text}] if text else parts


def _media(images: Sequence[Any] | None, videos: Sequence[Any] | None, before: str = "") -> list[MediaPart]:
    """Returns the pictures and videos of a message, or of a prompt. `before`: what names of fields in errors begin
    with."""
    return [
        _item(given, f"{before}{name}", modality)
        for name, modality, items in (("images", IMAGE, images), ("videos", VIDEO, videos))
        for given in items or ()
    ]


def _item(given: Any, place: str, modality: str) -> MediaPart:
    """Returns the item of base64 text or a data: URL; the error of another type is in it. Clients of Ollama send sound
    among the images, and its first bytes decide."""
    origin = PartOrigin(place, "", place.partition(":")[0])
    if not isinstance(given, str):
        fault = f"{place} must be texts in base64, got {type(given).__name__}"
        return MediaPart(fault=fault, origin=origin, modality=modality)
    url = given if given.startswith("data:") else f"data:;base64,{given}"
    if modality == IMAGE and _is_sound(url):
        modality = AUDIO
    return MediaPart(url, origin=origin, modality=modality)


def _is_sound(url: str) -> bool:
    """Returns whether the first bytes of a data: URL are those of a file of sound."""
    head = url.partition(",")[2][:BASE64_HEAD]
    try:
        return is_sound_file(base64.b64decode(head))
    except ValueError:  # the error of invalid base64 is that of the picture
        return False


def _text(message: Mapping[str, Any], name: str) -> str:
    """Returns a text field of a message; empty if it is missing. Raises InvalidArgument for another type."""
    value = message.get(name) or ""
    if not isinstance(value, str):
        raise InvalidArgument(f"messages: {name} must be text", field="messages")
    return value


def _list(message: Mapping[str, Any], name: str) -> list[Any]:
    """Returns a list field of a message; empty if it is missing. Raises InvalidArgument for another type."""
    value = message.get(name) or []
    if not isinstance(value, list):
        raise InvalidArgument(f"messages: {name} must be a list", field="messages")
    return value


def _call(number: int, call: Any) -> Mapping[str, Any]:
    """Converts a tool call. Ollama's calls have no ids, so they are numbered within a message. Arguments may be JSON
    text, as OpenAI's clients send them."""
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidArgument("messages: a tool call needs a function with a name", field="messages")
    if not isinstance(arguments, str | dict):
        text = f"messages: arguments of the tool call {name!r} must be an object, got {type(arguments).__name__}"
        raise InvalidArgument(text, field="messages")
    return conversation.tool_call(str(call.get("id") or f"call_{number}"), name, arguments)


def embed_request(
    body: OllamaBody, texts: list[str], headers: CallHeaders, *, truncate: bool, dimensions: int | None
) -> Request:
    """Returns the pooling request for these texts. `truncate`: drops the end of a text that is too long, instead of
    refusing it; `dimensions`: components to keep, None: all."""
    return Request(
        request_id=headers.request_id or uuid.uuid4().hex,
        model=body.model_name,
        prompts=[TextPrompt(text) for text in texts],
        sampling=Sampling(detokenize=False),
        pooling=Pooling(dimensions=dimensions),
        arrival_s=headers.arrival_s,
        deadline_s=headers.deadline_s,
        tenant=headers.tenant,
        truncate_prompt_tokens=-1 if truncate else None,
        truncation_side="right",
        final_only=True,
    )
