"""Limits on the number of list entries and the length of texts in a request.

The same for all edges; fields are identified by the names that clients use.
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
MAX_FIELDS = 256  # more than twice the number of known fields
MAX_IN_KEY, MAX_IN_VALUE = 64, 512  # characters of metadata; OpenAI's limits
TOKEN_ID_FIELDS = (
    "allowed_token_ids",
    "input_ids",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "stop_token_ids",
    "tokens",
)
LONG_LIST = 1024
TEXT_LIST_FIELDS = ("stop", "stop_sequences", "bad_words")
PROMPTS = ("prompt", "input", "text", "input_ids")  # items of /v1/responses have a separate limit
INNER = ("structured_outputs", "options", "sampling_params")  # nested objects with the same fields
FREE_FORM_FIELDS = (
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
)  # objects of arbitrary structure


def check_entries(fields: Iterable[tuple[str, Any]], limits: RequestLimits) -> None:
    """Checks the number of entries of lists and mappings against the limit for each field's name. Raises
    InvalidArgument."""
    for name, value in fields:
        limit = ENTRIES.get(name)
        if not value or limit is None or isinstance(value, str) or not isinstance(value, Sized):
            continue
        if len(value) > getattr(limits, limit):
            raise too_many(name, len(value), limit, getattr(limits, limit))
        if name in TEXT_LIST_FIELDS:
            check_words(name, value, limits)  # type: ignore[arg-type]


def check_words(name: str, words: Iterable[Any], limits: RequestLimits) -> None:
    """Raises InvalidArgument if a text in the list `name` is longer than max_word_characters; other values pass."""
    for word in words:
        if isinstance(word, str) and len(word) > limits.max_word_characters:
            text = f"{name}: a text of {len(word)} characters; at most {limits.max_word_characters} are accepted"
            raise InvalidArgument(f"{text} (max_word_characters).", field=name)


def too_many(name: str, count: int, limit: str, most: int) -> InvalidArgument:
    return InvalidArgument(f"{name} has {count} entries; at most {most} are accepted ({limit}).", field=name)


def check_body(body: Any, num_bytes: int, limits: RequestLimits) -> None:
    """Checks a parsed JSON body of `num_bytes` bytes before its fields are validated: numbers of fields, entries,
    prompts and content parts, types in id lists, lengths of texts. Anything but an object passes. Raises
    InvalidArgument."""
    body = merge_extra_body(body)
    if not isinstance(body, dict):
        return
    if len(body) > MAX_FIELDS:
        raise InvalidArgument(f"the body has {len(body)} fields; at most {MAX_FIELDS} are accepted.", field="body")
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
    """Checks the types in long lists of ids. Later validation would describe every wrong entry, which takes seconds."""
    for name in TOKEN_ID_FIELDS:
        given = body.get(name)
        if isinstance(given, list) and len(given) > LONG_LIST:
            inner = [*chain.from_iterable(filter(_is_list, given))] if isinstance(given[0], list) else []
            kinds = {*map(type, given), *map(type, inner)}
            if not kinds <= ({int, list} if inner else {int}):
                raise InvalidArgument(f"{name} must hold token ids, which are integers.", field=name)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def check_metadata(metadata: Any) -> None:
    """Raises InvalidArgument if a key or a text of the mapping is too long; anything but a mapping passes."""
    for key, value in metadata.items() if isinstance(metadata, dict) else ():
        if len(key) > MAX_IN_KEY or (isinstance(value, str) and len(value) > MAX_IN_VALUE):
            most = f"keys have at most {MAX_IN_KEY} characters, values {MAX_IN_VALUE}"
            raise InvalidArgument(f"metadata: {key[:MAX_IN_KEY]!r}: {most}.", field="metadata")


def _check_parts(body: Mapping[str, Any], limits: RequestLimits) -> None:
    """Raises InvalidArgument if the messages together hold more than max_parts content parts, tool calls and summaries,
    or a batch of conversations more than max_messages messages."""
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
                    entries = message.get(part)
                    count += len(entries) if isinstance(entries, list) else 0
        if count > limits.max_parts:
            text = f"{name}: {count} content parts and tool calls; at most {limits.max_parts} are accepted (max_parts)."
            raise InvalidArgument(text, field=name)


def _check_forms(body: Mapping[str, Any], limits: RequestLimits) -> None:
    """Raises InvalidArgument if the free-form fields (schemas, tools, variables) together hold more than
    max_form_characters."""
    remaining = limits.max_form_characters
    for name in FREE_FORM_FIELDS:
        if name == "text" and isinstance(body.get(name), (str, list)):  # prompts
            continue
        remaining -= count_characters(body.get(name), remaining)
        if remaining < 0:
            raise too_long_form(name, limits)


def too_long_form(name: str, limits: RequestLimits) -> InvalidArgument:
    """Returns the error for free-form fields that exceed max_form_characters together; `name`: the field that did."""
    text = f"{name}: tools, schemas and grammars may have at most {limits.max_form_characters} characters together"
    return InvalidArgument(f"{text} (max_form_characters).", field=name)


def count_characters(value: Any, enough: int) -> int:
    """Returns the characters of all texts within a value, keys included, plus one per other value; stops beyond
    `enough`."""
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
