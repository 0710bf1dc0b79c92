"""What a prompt may be, looked at before it is put through a template or tokenized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.frontend.bounds import counts
from services.frontend.input_processor.prompt_limits import TOO_LONG
from services.frontend.request import ChatPrompt, Request, TextPrompt
from shared import structured_output
from shared.errors import InvalidArgument
from shared.settings.request_limits import RequestLimits

FIELDS = ("stop", "stop_token_ids", "bad_words", "logit_bias")


def check(request: Request, limits: RequestLimits) -> None:
    """What edges make of calls, once more in their common form: messages may have been stored before."""
    sampling = request.sampling
    counts.check_entries(((name, getattr(sampling, name)) for name in FIELDS), limits)
    constraint = sampling.structured_output
    if constraint is not None and structured_output.check_size(constraint) == "choice":
        counts.check_entries([("choice", constraint.choice.options)], limits)
    for prompt in request.prompts:
        if isinstance(prompt, ChatPrompt):
            counts.check_entries([("messages", prompt.messages), ("tools", prompt.tools)], limits)


def check_characters(prompt: TextPrompt | ChatPrompt, max_model_len: int, longest_token: int) -> None:
    """By what one token stands for at most, `longest_token` characters. Raises InvalidArgument."""
    most = max_model_len * longest_token
    is_text = isinstance(prompt, TextPrompt)
    characters = len(prompt.text) if isinstance(prompt, TextPrompt) else characters_of(prompt, most)
    if characters > most:
        has = f"{characters} characters" if is_text else f"more than {most} characters"
        raise InvalidArgument(
            f"This model's maximum context length is {max_model_len} tokens, in which at most {most} characters fit. "
            f"However, your {'prompt has' if is_text else 'messages have'} {has}. Please reduce their number.",
            field="prompt" if is_text else "messages",
            reason=TOO_LONG,
        )


def characters_of(prompt: ChatPrompt, enough: int) -> int:
    """Of the conversation and all that the template sees of the request; stops counting beyond `enough`."""
    count = 0
    for value in _values(prompt):
        count += len(value) if isinstance(value, str) else counts.characters_of(value, enough - count)
        if count > enough:
            break
    return count


def _values(prompt: ChatPrompt) -> Iterator[Any]:
    for message in prompt.messages:
        yield from message.values()
    yield from prompt.tools
    yield from prompt.template_variables.values()
