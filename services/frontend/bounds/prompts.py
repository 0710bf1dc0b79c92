"""Limits on prompts, checked before they are rendered or tokenized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.services.frontend.bounds import counts
from quire.services.frontend.bounds.prompt_limit import PromptLimit
from quire.services.frontend.request.request import ChatPrompt, LateInteractionPrompt, PairPrompt, Request, TextPrompt
from quire.shared import structured_output
from quire.shared.settings.request_limits import RequestLimits

FIELDS = ("stop", "stop_token_ids", "bad_words", "logit_bias", "logits_processors")


def check(request: Request, limits: RequestLimits) -> None:
    """Checks the counts of a request in the common form: messages may come from storage instead of a checked body."""
    sampling = request.sampling
    counts.check_entries(((name, getattr(sampling, name)) for name in FIELDS), limits)
    constraint = sampling.structured_output
    if constraint is not None and structured_output.check_size(constraint) == "choice":
        counts.check_entries([("choice", constraint.choice.options)], limits)
    for prompt in request.prompts:
        if isinstance(prompt, ChatPrompt):
            counts.check_entries([("messages", prompt.messages), ("tools", prompt.tools)], limits)


def check_characters(prompt: TextPrompt | PairPrompt | ChatPrompt, prompt_limit: PromptLimit) -> None:
    """Checks the length of a prompt's texts in characters. Raises InvalidArgument; does nothing while the limit is
    unknown."""
    if not prompt_limit.max_model_len:
        return
    match prompt:
        case TextPrompt(text):
            prompt_limit.check_characters(len(text), is_text=True)
            if isinstance(prompt, LateInteractionPrompt) and prompt.query is not None:
                prompt_limit.check_characters(len(prompt.query), is_text=True)
        case PairPrompt(first, second):
            prompt_limit.check_characters(len(first) + len(second), is_text=True)
        case ChatPrompt():
            prompt_limit.check_characters(characters_of(prompt, prompt_limit.max_characters), is_text=False)


def characters_of(prompt: ChatPrompt, enough: int) -> int:
    """Returns the characters of the conversation and of everything else the template reads; stops beyond `enough`."""
    count = 0
    for value in _values(prompt):
        count += len(value) if isinstance(value, str) else counts.count_characters(value, enough - count)
        if count > enough:
            break
    return count


def _values(prompt: ChatPrompt) -> Iterator[Any]:
    """Yields everything in the conversation that the template reads: message fields, tools, template variables."""
    for message in prompt.messages:
        yield from message.values()
    yield from prompt.tools
    yield from prompt.template_variables.values()
