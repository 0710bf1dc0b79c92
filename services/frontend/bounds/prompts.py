"""Limits on prompts, checked before they are rendered or tokenized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.services.frontend.bounds import counts
from quire.services.frontend.request.request import ChatPrompt, LateInteractionPrompt, PairPrompt, Request, TextPrompt
from quire.shared import structured_output
from quire.shared.errors import InvalidArgument
from quire.shared.settings.request_limits import RequestLimits

FIELDS = ("stop", "stop_token_ids", "bad_words", "logit_bias", "logits_processors")
TOO_LONG = "context_length_exceeded"  # OpenAI's error code
LONGEST_CHARACTER = 4  # UTF-8 bytes


def check(request: Request, limits: RequestLimits) -> None:
    """Checks the counts of a request in the common form: messages may come from storage instead of a checked body."""
    sampling = request.sampling
    given = [(name, value) for name in FIELDS if (value := getattr(sampling, name))]
    if given:
        counts.check_entries(given, limits)
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


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Length limit of one prompt, in tokens, and the characters and bytes that so many tokens hold at most."""

    max_model_len: int  # tokens; 0: unknown
    longest_token: int  # characters

    @property
    def max_characters(self) -> int:
        """Maximum number of characters of the prompt."""
        return self.max_model_len * self.longest_token

    def truncate(self, text: str, side: str = "right") -> str:
        """Truncates a text of which only the first tokens will be used, or, with side "left", the last."""
        too_many = len(text) - self.max_characters if self.max_model_len else 0
        if too_many <= 0:
            return text
        return text[too_many:] if side == "left" else text[: self.max_characters]

    def truncate_pair(self, first: str, second: str, side: str) -> tuple[str, str]:
        """Truncates two texts that are tokenized together to max_characters in all: at the end of the second or, with
        side "left", at the start of the first."""
        first, second = self.truncate(first, side), self.truncate(second, side)
        too_many = len(first) + len(second) - self.max_characters if self.max_model_len else 0
        if too_many <= 0:
            return first, second
        return (first[too_many:], second) if side == "left" else (first, second[: self.max_characters - len(first)])

    def check_characters(self, characters: int, *, is_text: bool) -> None:
        """Checks a number of characters: of a text, or, for a conversation, a lower bound. Raises InvalidArgument; the
        text of the error depends on `is_text`."""
        if self.max_model_len and characters > self.max_characters:
            has = f"{characters} characters" if is_text else f"more than {self.max_characters} characters"
            raise InvalidArgument(
                f"This model's maximum context length is {self.max_model_len} tokens, in which at most "
                f"{self.max_characters} characters fit. "
                f"However, your {'prompt has' if is_text else 'messages have'} {has}. "
                "Please reduce their number.",
                field="prompt" if is_text else "messages",
                reason=TOO_LONG,
            )

    def check_bytes(self, count: int) -> None:
        """Checks the length of a UTF-8 prompt in bytes before it is decoded. Raises InvalidArgument; does nothing while
        the limit is unknown."""
        if self.max_model_len and count > LONGEST_CHARACTER * self.max_characters:
            raise InvalidArgument(
                f"This model's maximum context length is {self.max_model_len} tokens, in which at most "
                f"{LONGEST_CHARACTER * self.max_characters} bytes fit. However, your prompt has {count} bytes. "
                "Please reduce their number.",
                field="prompt",
                reason=TOO_LONG,
            )

    def check_tokens(self, count: int) -> None:
        """Checks the length of a prompt to be continued, in tokens. Raises InvalidArgument."""
        if self.max_model_len:
            check_length(count, self.max_model_len)


def check_length(length: int, max_model_len: int, *, is_continued: bool = True) -> None:
    """Raises InvalidArgument if a prompt of `length` tokens exceeds the context; with `is_continued` it must
    leave space for one token more."""
    if length + is_continued > max_model_len:
        suffix = (
            ", and at least one is left for the output. Please reduce its length."
            if is_continued
            else (". Please reduce its length, or send truncate_prompt_tokens: -1.")
        )
        raise InvalidArgument(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt resulted in {length} "
            f"tokens{suffix}",
            field="prompt",
            reason=TOO_LONG,
        )
