"""How many characters a prompt may have: so many that tokens could be made of them that fit."""

from __future__ import annotations

from dataclasses import dataclass

from quire.shared.errors import InvalidArgument

TOO_LONG = "context_length_exceeded"  # OpenAI's word
LONGEST_CHARACTER = 4  # bytes of UTF-8


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """For one prompt."""

    max_model_len: int  # tokens; 0 while nobody knows it
    longest_token: int  # characters

    @property
    def max_characters(self) -> int:
        """Characters."""
        return self.max_model_len * self.longest_token

    def truncate(self, text: str, side: str = "right") -> str:
        """Of a text whose first tokens alone will be read, or, cut at its left side, the last."""
        too_many = len(text) - self.max_characters if self.max_model_len else 0
        if too_many <= 0:
            return text
        return text[too_many:] if side == "left" else text[: self.max_characters]

    def truncate_pair(self, first: str, second: str, side: str) -> tuple[str, str]:
        """The same of two texts side by side."""
        first, second = self.truncate(first, side), self.truncate(second, side)
        too_many = len(first) + len(second) - self.max_characters if self.max_model_len else 0
        if too_many <= 0:
            return first, second
        return (first[too_many:], second) if side == "left" else (first, second[: self.max_characters - len(first)])

    def check_characters(self, characters: int, *, is_text: bool) -> None:
        """Of a text, or, at least, of a conversation. Raises InvalidArgument."""
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
        """Of a prompt in UTF-8 that nobody has decoded yet. Raises InvalidArgument."""
        if self.max_model_len and count > LONGEST_CHARACTER * self.max_characters:
            raise InvalidArgument(
                f"This model's maximum context length is {self.max_model_len} tokens, in which at most "
                f"{LONGEST_CHARACTER * self.max_characters} bytes fit. However, your prompt has {count} bytes. "
                "Please reduce their number.",
                field="prompt",
                reason=TOO_LONG,
            )

    def check_tokens(self, count: int) -> None:
        """Of a prompt that is to be gone on with. Raises InvalidArgument."""
        if self.max_model_len:
            check_length(count, self.max_model_len)


def check_length(length: int, max_model_len: int, *, goes_on: bool = True) -> None:
    """Of a prompt in tokens: one that goes on has to leave room for one more."""
    if length + goes_on > max_model_len:
        behind = (
            ", and at least one is left for the output. Please reduce its length."
            if goes_on
            else (". Please reduce its length, or send truncate_prompt_tokens: -1.")
        )
        raise InvalidArgument(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt resulted in {length} "
            f"tokens{behind}",
            field="prompt",
            reason=TOO_LONG,
        )
