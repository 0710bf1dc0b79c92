"""How many entries a request's lists may have, and how long their texts may be.

The same for every edge: fields go by the names that clients know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from itertools import chain
from typing import Any

from quire.services.frontend.bounds.bodies.extra_body import merge_extra_body
from quire.shared.errors import InvalidArgument
from quire.shared.settings.request_limits import RequestLimits

ENTRIES = {
    "messages": "max_messages",
    "input": "max_messages",
    "documents": "max_messages",
    "tools": "max_tools",
    "stop": "max_stop",
    "stop_sequences": "max_stop",
    "stop_token_ids": "max_stop_token_ids",
    "bad_words": "max_bad_words",
    "logit_bias": "max_logit_bias",
    "logits_processors": "max_logits_processors",
    "choice": "max_choices",
    "metadata": "max_metadata",
}
MAX_FIELDS = 256  # there are not half as many
MAX_IN_KEY, MAX_IN_VALUE = 64, 512  # characters of metadata, OpenAI's own bounds
NUMBERS = (
    "allowed_token_ids",
    "input_ids",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "stop_token_ids",
    "tokens",
)
LONG = 1024
WORDS = ("stop", "stop_sequences", "bad_words")
PROMPTS = ("prompt", "input", "text", "input_ids")  # items of responses have a bound of their own
INNER = ("structured_outputs", "options", "sampling_params")  # objects with such fields of their own
FORMS = (
    "tools",
    "response_format",
    "structured_outputs",
    "text",
    "output_config",
    "chat_template_kwargs",
    "documents",
    "tool_choice",
    "format",
    "sampling_params",
)  # free of form


def check_entries(fields: Iterable[tuple[str, Any]], limits: RequestLimits) -> None:
    """Of lists and mappings; texts are none. Raises InvalidArgument."""
    for name, value in fields:
        limit = ENTRIES.get(name)
        if not value or limit is None or isinstance(value, str) or not isinstance(value, Sized):
            continue
        if len(value) > getattr(limits, limit):
            raise too_many(name, len(value), limit, getattr(limits, limit))
        if name in WORDS:
            check_words(name, value, limits)  # type: ignore[arg-type]


def check_words(name: str, words: Iterable[Any], limits: RequestLimits) -> None:
    for word in words:
        if isinstance(word, str) and len(word) > limits.max_word_characters:
            text = f"{name}: a text of {len(word)} characters; at most {limits.max_word_characters} are taken"
            raise InvalidArgument(f"{text} (max_word_characters).", field=name)


def too_many(name: str, count: int, limit: str, most: int) -> InvalidArgument:
    return InvalidArgument(f"{name} has {count} entries; at most {most} are taken ({limit}).", field=name)


def check_body(body: Any, num_bytes: int, limits: RequestLimits) -> None:
    """Of a parsed JSON body of so many bytes, before its fields are looked at one by one."""
    body = merge_extra_body(body)
    if not isinstance(body, dict):
        return
    if len(body) > MAX_FIELDS:
        raise InvalidArgument(f"the body has {len(body)} fields; at most {MAX_FIELDS} are taken.", field="body")
    for inner in [body, *(body[name] for name in INNER if isinstance(body.get(name), dict))]:
        check_entries(inner.items(), limits)
        if isinstance(inner.get("stop"), str):
            check_words("stop", [inner["stop"]], limits)
    _check_numbers(body)
    for name in PROMPTS:
        prompts = body.get(name)
        if isinstance(prompts, list) and len(prompts) > limits.max_parts and isinstance(prompts[0], (str, list)):
            raise too_many(name, len(prompts), "max_parts", limits.max_parts)
    check_metadata(body.get("metadata"))
    _check_parts(body, limits)
    if num_bytes > limits.max_form_characters:
        _check_forms(body, limits)


def _check_numbers(body: Mapping[str, Any]) -> None:
    """Whoever looks at a long list more closely words every wrong entry of it, which takes seconds."""
    for name in NUMBERS:
        given = body.get(name)
        if isinstance(given, list) and len(given) > LONG:
            inner = [*chain.from_iterable(filter(_is_list, given))] if isinstance(given[0], list) else []
            kinds = {*map(type, given), *map(type, inner)}
            if not kinds <= ({int, list} if inner else {int}):
                raise InvalidArgument(f"{name} must hold token ids, which are integers.", field=name)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def check_metadata(metadata: Any) -> None:
    for key, value in metadata.items() if isinstance(metadata, dict) else ():
        if len(key) > MAX_IN_KEY or (isinstance(value, str) and len(value) > MAX_IN_VALUE):
            most = f"keys have at most {MAX_IN_KEY} characters, values {MAX_IN_VALUE}"
            raise InvalidArgument(f"metadata: {key[:MAX_IN_KEY]!r}: {most}.", field="metadata")


def _check_parts(body: Mapping[str, Any], limits: RequestLimits) -> None:
    for name in ("messages", "input"):
        messages = body.get(name)
        if not isinstance(messages, list):
            continue
        if any(map(_is_list, messages)):  # a batch of conversations
            messages = list(chain.from_iterable(filter(_is_list, messages)))
            if len(messages) > limits.max_messages:
                raise too_many(name, len(messages), "max_messages", limits.max_messages)
        count = 0
        for message in messages:
            if isinstance(message, dict):
                for part in ("content", "tool_calls", "summary"):
                    held = message.get(part)
                    count += len(held) if isinstance(held, list) else 0
        if count > limits.max_parts:
            text = f"{name}: {count} content parts and tool calls; at most {limits.max_parts} are taken (max_parts)."
            raise InvalidArgument(text, field=name)


def _check_forms(body: Mapping[str, Any], limits: RequestLimits) -> None:
    left = limits.max_form_characters
    for name in FORMS:
        if name == "text" and isinstance(body.get(name), (str, list)):  # prompts
            continue
        left -= characters_of(body.get(name), left)
        if left < 0:
            raise too_long_form(name, limits)


def too_long_form(name: str, limits: RequestLimits) -> InvalidArgument:
    text = f"{name}: tools, schemas and the like may have {limits.max_form_characters} characters together"
    return InvalidArgument(f"{text} (max_form_characters).", field=name)


def characters_of(value: Any, enough: int) -> int:
    """Of all texts within, keys included, and one for each other value; stops counting beyond `enough`."""
    count, rest = 0, [value]
    while rest and count <= enough:
        node = rest.pop()
        if isinstance(node, str):
            count += len(node)
        elif isinstance(node, dict):
            rest.extend(node)
            rest.extend(node.values())
        elif isinstance(node, list | tuple):
            rest.extend(node)
        count += 1
    return count
