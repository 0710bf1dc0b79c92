"""Policy for unknown body fields: they are counted and ignored, unless they look like a misspelt known field."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import lru_cache

from quire.services.frontend.input_processor.sampling.unsupported_samplers import IGNORED_SAMPLER_FIELDS
from quire.shared.errors import InvalidArgument

# Fields that clients of other servers send and that have no effect here; each has its own metric label.
LABELS = (
    *IGNORED_SAMPLER_FIELDS,
    "allowed_openai_params", "api_base", "api_key", "background_tasks", "cache_prompt", "caching", "chat_id",
    "client_metadata", "custom_llm_provider", "drop_params", "enable_search", "extra_body", "extra_content",
    "extra_headers", "extra_query", "features", "generation_config", "id", "id_slot", "incremental_output",
    "keep_alive", "litellm_metadata", "model_item", "models", "n_keep", "n_probs", "num_ctx", "num_retries", "nvext",
    "options", "parse_tool_calls", "plugins", "post_sampling_probs", "prompt_id", "provider", "provider_options",
    "provider_specific_fields", "reasoning_details", "reasoning_format", "reasoning_split", "request_timeout",
    "response_fields", "route", "session", "slot_id", "tags", "thinking_blocks", "timeout", "timestamp",
    "timings_per_token", "title", "tool_ids", "trace", "transforms", "ttl", "usage", "venice_parameters",
)  # fmt: skip
OTHER = "other"
# Name in other APIs -> name in OpenAI's API. Ignoring such a field would change the answer.
NAMES_ELSEWHERE = {
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "maxOutputTokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "inputSchema": "parameters",
    "input_schema": "parameters",
    "parameters": "input_schema",
    "stop_sequences": "stop",
    "stopSequences": "stop",
    "system_prompt": "messages",
}
LONGEST_NAME = 64  # characters; longer names are not compared
MAX_NAMES = 256  # unknown names per kind of object in a body; each is compared with all known names
LIKENESS = 0.8  # similarity from 0 to 1: two of five letters swapped, or two of eleven wrong


class UnknownFields:
    """Policy of one server for fields that a body does not declare: ignore and count them, or refuse those likely
    misspelt, or all."""

    def __init__(self, count: Callable[[str], None], *, strict: bool = False) -> None:
        """Stores the policy. `count`: called with one of LABELS or OTHER; `strict`: refuses every unknown field."""
        self._count = count
        self._is_strict = strict

    def check(self, names: Iterable[str], known: Collection[str], place: str = "") -> None:
        """Counts undeclared names. Raises InvalidArgument for one that resembles a name in `known`, for any with a
        strict policy, or for more than MAX_NAMES. `place`: prefix of the names, such as `options.`."""
        fields = frozenset(known)
        for number, name in enumerate(names):
            if number >= MAX_NAMES:
                raise too_many_names(place)
            likely = likely_name(name, fields)
            if likely or self._is_strict:
                raise unrecognized(place + name, place + likely if likely else "")
            self._count(name if name in LABELS else OTHER)


def unrecognized(name: str, likely: str = "") -> InvalidArgument:
    """Returns the error for a refused field; `likely`: the name that was probably meant."""
    hint = f"; did you mean {likely!r}?" if likely else ""
    return InvalidArgument(f"Unrecognized request argument supplied: {name:.64}{hint}", field=name)


def too_many_names(place: str) -> InvalidArgument:
    """Returns the error for too many unknown fields; `place`: prefix of their names, or empty."""
    field = re.split(r"[.\[]", place, maxsplit=1)[0] or "body"
    text = f"{place.rstrip('.') or 'the body'} has more than {MAX_NAMES} unknown fields: remove them"
    return InvalidArgument(text, field=field)


@lru_cache(maxsize=4096)
def likely_name(name: str, known: frozenset[str]) -> str:
    """Returns the known field that the client probably meant, or an empty string."""
    if name in LABELS or len(name) > LONGEST_NAME:
        return ""
    if (elsewhere := NAMES_ELSEWHERE.get(name)) in known:
        return str(elsewhere)
    plain, letters_of_name = _plain(name), frozenset(_plain(name))
    near = {
        other: field
        for other, (field, letters) in _spelled(known).items()
        if _may_be_near(plain, letters_of_name, other, letters)
    }
    found = get_close_matches(plain, near, n=1, cutoff=LIKENESS)
    return near[found[0]] if found else ""


@lru_cache(maxsize=256)
def _spelled(known: frozenset[str]) -> dict[str, tuple[str, frozenset[str]]]:
    """Maps the plain spelling of each field to the field and the letters of that spelling."""
    return {_plain(field): (field, frozenset(_plain(field))) for field in sorted(known)}


def _may_be_near(name: str, letters: frozenset[str], other: str, others: frozenset[str]) -> bool:
    """Whether two names may be similar enough, judged by letters that only one of them has; a cheap filter before the
    comparison."""
    common = min(len(name) - len(letters - others), len(other) - len(others - letters))
    return 2 * common >= LIKENESS * (len(name) + len(other))


def _plain(name: str) -> str:
    """Returns the name without the differences between naming styles: maxTokens, max-tokens, max_tokens."""
    return name.lower().replace("-", "").replace("_", "")


def ignore(_: str) -> None:
    """Counts nothing; the `count` callback of STRICT."""


STRICT = UnknownFields(ignore, strict=True)
