"""Protection against control tokens that users spell in their texts.

Control tokens are those that the tokenizer calls special, and the markers that the chat template writes (of tool calls,
of reasoning). Where a conversation spells one, the template gets a private-use character in its place, so that every
control token in the rendered text comes from the template. The text between control tokens is then tokenized as it is,
and a section with a hidden spelling by a tokenizer that knows no control tokens. Partial spellings at the ends of texts
are hidden as well, since adjoining texts could complete them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer.text_matcher import TextMatcher
from quire.shared.errors import InvalidArgument

FIRST, LAST = 0xF0000, 0x10FFFD
PRIVATE = f"[{chr(FIRST)}-{chr(LAST)}]"  # planes of private use
HIDDEN = re.compile(PRIVATE)
# The same, escaped in ASCII JSON
ESCAPED = re.compile(r"((?<!\\)(?:\\\\)*)\\u(db[89a-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})")
ANSWER_FIELDS = frozenset({"content", "reasoning_content", "reasoning", "thinking"})


class TextSection(NamedTuple):
    """Section of a text: between two control tokens if `plain`, else including the control tokens around it."""

    text: str
    plain: bool


@dataclass(frozen=True, slots=True)
class ControlToken:
    """Control token, as tokenizer.json describes it."""

    text: str
    special: bool
    normalized: bool  # matched in the normalized text
    single_word: bool  # matched only as a whole word
    lstrip: bool  # includes the white space on its left
    rstrip: bool


class ControlTokens:
    """Control tokens of one model."""

    def __init__(
        self,
        added: Iterable[Mapping[str, Any]],
        template: str,
        marks: Iterable[str] = (),
        normalize: Callable[[str], str] | None = None,
        placeholders: Collection[str] = (),
    ) -> None:
        """Collects the control tokens among the added ones.

        `added`: the added tokens of tokenizer.json. `marks`: markers of reasoning, also if the template does not
        contain them. `normalize`: the tokenizer's normalization of a text. `placeholders`: tokens that stand for
        media.
        """
        marks = set(marks)
        control_tokens = [
            _control_token(token)
            for token in added
            if token["special"]
            or token["content"] in placeholders
            or _is_control_token(token["content"], template, marks)
        ]
        whole_words = [token.text for token in control_tokens if token.single_word]
        self.tokens: dict[str, ControlToken] = {token.text: token for token in control_tokens}
        self._in_rendered = TextMatcher(self.tokens, whole_words)
        self._in_questions = TextMatcher(self.tokens, others=PRIVATE)
        # The assistant's earlier turns may contain what the parsers of answers left in them.
        self._in_answers = TextMatcher(
            (
                token.text
                for token in control_tokens
                if (token.special and token.text not in marks) or token.text in placeholders
            ),
            others=PRIVATE,
        )
        self._normalize = normalize if any(token.normalized for token in control_tokens) else None

    def hide(self, prompt: ChatPrompt) -> tuple[ChatPrompt, HiddenTexts]:
        """Returns the conversation with all spellings of control tokens in messages, tools and variables replaced by
        placeholders, and the hidden texts for restoring them."""
        hidden = HiddenTexts()
        messages = [self._message(message, hidden) for message in prompt.messages]
        tools = [self._value(tool, self._in_questions, hidden) for tool in prompt.tools]
        variables = self._value(prompt.template_variables, self._in_questions, hidden)
        if not hidden.texts:
            return prompt, hidden
        return replace(prompt, messages=messages, tools=tools, template_variables=variables), hidden

    def _message(self, message: Mapping[str, Any], hidden: HiddenTexts) -> Mapping[str, Any]:
        """Returns the message with control tokens in its values and its role replaced by placeholders. Fields of an
        assistant's answer keep markers that the parsers of answers left in them; only other special tokens are
        replaced there."""
        is_answer = message.get("role") == "assistant"
        shown = {
            name: self._value(
                value, self._in_answers if is_answer and name in ANSWER_FIELDS else self._in_questions, hidden
            )
            for name, value in message.items()
            if name != "role"
        }
        role = str(message.get("role", ""))  # templates write markers around the role and compare it
        return {**message, **shown, "role": _replaced(role, [*self._in_questions.spans(role)], hidden)}

    def _value(self, value: Any, spellings: TextMatcher, hidden: HiddenTexts) -> Any:
        """Returns a copy of a JSON value with the spellings replaced in all its texts, keys included."""
        if isinstance(value, str):
            return self._text(value, spellings, hidden)
        if isinstance(value, Mapping):
            return {
                self._text(name, spellings, hidden): self._value(inner, spellings, hidden)
                for name, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._value(inner, spellings, hidden) for inner in value]
        return value

    def _text(self, text: str, spellings: TextMatcher, hidden: HiddenTexts) -> str:
        """Replaces spelled control tokens in a text by placeholders; if only the normalized text spells one, the
        whole text is replaced."""
        spans = _spans_in(text, spellings)
        if self._normalize is not None and not spans and next(spellings.spans(self._normalize(text)), None):
            spans = [(0, len(text))]
        return _replaced(text, spans, hidden)

    def sections(self, text: str, hidden: HiddenTexts) -> list[TextSection]:
        """Splits a rendered text into sections, with the hidden texts restored."""
        if not hidden.texts:
            return [TextSection(text, plain=False)]
        return list(_merge(self._cut(text), hidden))

    def _cut(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields control tokens (True), each including its white space, and the texts between them."""
        position = 0
        for first, last in self._in_rendered.spans(text):
            start, end = self._with_blanks(text, first, last, position)
            yield text[position:start], False
            yield text[start:end], True
            position = end
        yield text[position:], False

    def _with_blanks(self, text: str, start: int, end: int, first_allowed: int) -> tuple[int, int]:
        """Extends a token's span [start, end) by the blanks that it would strip, left no further than
        `first_allowed`."""
        token = self.tokens[text[start:end]]
        while token.lstrip and start > first_allowed and text[start - 1].isspace():
            start -= 1
        while token.rstrip and end < len(text) and text[end].isspace():
            end += 1
        return start, end


class HiddenTexts:
    """Hidden texts of one conversation and their placeholder characters."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._characters: dict[str, str] = {}

    def placeholder(self, text: str) -> str:
        """Returns the private-use character that stands for `text`, the same for equal texts. Raises InvalidArgument
        if all characters are in use."""
        if text not in self._characters:
            if len(self.texts) > LAST - FIRST:
                raise InvalidArgument("messages: too many different private-use characters", field="messages")
            self._characters[text] = chr(FIRST + len(self.texts))
            self.texts.append(text)
        return self._characters[text]

    def restore(self, text: str) -> str:
        return HIDDEN.sub(self._restored, text)

    def _restored(self, match: re.Match[str]) -> str:
        number = ord(match[0]) - FIRST
        return self.texts[number] if number < len(self.texts) else match[0]


def unescape_private_use(json_text: str) -> str:
    """Restores private-use characters in ASCII JSON, since placeholders must stay characters."""
    return ESCAPED.sub(lambda found: found[1] + bytes.fromhex(found[2] + found[3]).decode("utf-16-be"), json_text)


def _control_token(token: Mapping[str, Any]) -> ControlToken:
    """Reads a token from an entry of added_tokens in tokenizer.json."""
    return ControlToken(
        text=token["content"],
        special=token["special"],
        normalized=token["normalized"],
        single_word=token["single_word"],
        lstrip=token["lstrip"],
        rstrip=token["rstrip"],
    )


def _is_control_token(text: str, template: str, marks: set[str]) -> bool:
    """Returns whether an added token is a control token. Others are ordinary text (runs of blanks, tags of HTML)."""
    return text in marks or (not text.isspace() and not text.isalnum() and text in template)


def _merge(parts: Iterable[tuple[str, bool]], hidden: HiddenTexts) -> Iterator[TextSection]:
    """Joins neighbouring parts without hidden texts to one section; parts with placeholders become plain sections
    with the restored text."""
    joined: list[str] = []
    for text, is_control_token in parts:
        if is_control_token or HIDDEN.search(text) is None:
            joined.append(text)
            continue
        if any(joined):
            yield TextSection("".join(joined), plain=False)
        joined = []
        yield TextSection(hidden.restore(text), plain=True)
    if any(joined):
        yield TextSection("".join(joined), plain=False)


def _replaced(text: str, spans: Sequence[tuple[int, int]], hidden: HiddenTexts) -> str:
    """Replaces the ascending, disjoint spans [start, end) by placeholders, and stores the hidden texts."""
    if not spans:
        return text
    parts, position = [], 0
    for start, end in spans:
        parts += [text[position:start], hidden.placeholder(text[start:end])]
        position = end
    return "".join([*parts, text[position:]])


def _spans_in(text: str, spellings: TextMatcher) -> list[tuple[int, int]]:
    """Returns the spans of spellings, and of partial ones that adjoining texts could complete."""
    spans = list(spellings.spans(text))
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())  # many templates strip
    begin_end = spellings.suffix_end(text, start)
    if begin_end > start:
        spans.insert(0, (start, min(begin_end, spans[0][0]) if spans else begin_end))
    end_start = spellings.prefix_start(text, end)
    if end_start < end:
        spans.append((max(end_start, spans[-1][1]) if spans else end_start, end))
    return [(first, last) for first, last in spans if first < last]
