"""The text of users stays text: what spells a control token there becomes none.

Control tokens are those that the tokenizer calls special, and the marks that the chat template writes (of tool calls,
of reasoning). Where a conversation spells one, the template is given a character of private use in its place, so that
it works with the same conversation, and every control token in what it writes is its own. The sections between those
are then tokenized as they are, and a section that holds something hidden by a tokenizer that knows no control tokens.
Also hidden is what could become a spelling where texts meet: its beginning at the end of a text, its end at the
beginning of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer.text_matcher import TextMatcher
from quire.shared.errors import InvalidArgument

FIRST, LAST = 0xF0000, 0x10FFFD
PRIVATE = f"[{chr(FIRST)}-{chr(LAST)}]"  # planes of private use
HIDDEN = re.compile(PRIVATE)
ESCAPED = re.compile(r"((?<!\\)(?:\\\\)*)\\u(db[89a-f][0-9a-f])\\u(d[c-f][0-9a-f]{2})")  # the same in ASCII's JSON
SAID = frozenset({"content", "reasoning_content", "reasoning", "thinking"})


class TextSection(NamedTuple):
    """Of a text: between two control tokens where `plain`, else with those around it."""

    text: str
    plain: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """A control token, as tokenizer.json describes it."""

    text: str
    special: bool
    normalized: bool  # looked for in the normalized text
    alone: bool  # only where no letters are beside it
    takes_left: bool  # blanks on its left are its own
    takes_right: bool


class ControlTokens:
    """Of one model."""

    def __init__(
        self,
        added: Iterable[Mapping[str, Any]],
        template: str,
        marks: Iterable[str] = (),
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        """`added`: the added tokens of tokenizer.json. `marks`: of reasoning, whatever the template says. `normalize`:
        what the tokenizer does to a text first."""
        marks = set(marks)
        found = [_mark(token) for token in added if token["special"] or _is_mark(token["content"], template, marks)]
        alone = [mark.text for mark in found if mark.alone]
        self.marks: dict[str, Mark] = {mark.text: mark for mark in found}
        self._written = TextMatcher(self.marks, alone)
        self._asked = TextMatcher(self.marks, others=PRIVATE)
        # An assistant's own turns hold what the parsers of answers left in them.
        self._answered = TextMatcher(
            (mark.text for mark in found if mark.special and mark.text not in marks), others=PRIVATE
        )
        self._normalize = normalize if any(mark.normalized for mark in found) else None

    def hide(self, prompt: ChatPrompt) -> tuple[ChatPrompt, Hidden]:
        """The same conversation, without a spelling that is not the template's."""
        hidden = Hidden()
        messages = [self._message(message, hidden) for message in prompt.messages]
        tools = [self._value(tool, self._asked, hidden) for tool in prompt.tools]
        variables = self._value(prompt.template_variables, self._asked, hidden)
        if not hidden.texts:
            return prompt, hidden
        return replace(prompt, messages=messages, tools=tools, template_variables=variables), hidden

    def _message(self, message: Mapping[str, Any], hidden: Hidden) -> Mapping[str, Any]:
        is_answer = message.get("role") == "assistant"
        shown = {
            name: self._value(value, self._answered if is_answer and name in SAID else self._asked, hidden)
            for name, value in message.items()
            if name != "role"
        }
        role = str(message.get("role", ""))  # templates write marks around it and compare it
        return {**message, **shown, "role": _replaced(role, [*self._asked.spans(role)], hidden)}

    def _value(self, value: Any, spellings: TextMatcher, hidden: Hidden) -> Any:
        """With nothing left in any text of it."""
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

    def _text(self, text: str, spellings: TextMatcher, hidden: Hidden) -> str:
        spans = _spans_in(text, spellings)
        if self._normalize is not None and not spans and next(spellings.spans(self._normalize(text)), None):
            spans = [(0, len(text))]
        return _replaced(text, spans, hidden)

    def sections(self, text: str, hidden: Hidden) -> list[TextSection]:
        """Of what the template wrote, all that was hidden in its place."""
        if not hidden.texts:
            return [TextSection(text, plain=False)]
        return list(_merge(self._cut(text), hidden))

    def _cut(self, text: str) -> Iterator[tuple[str, bool]]:
        """Control tokens (True), each with the blanks that are its own, and what is between them."""
        position = 0
        for first, last in self._written.spans(text):
            start, end = self._with_blanks(text, first, last, position)
            yield text[position:start], False
            yield text[start:end], True
            position = end
        yield text[position:], False

    def _with_blanks(self, text: str, start: int, end: int, least: int) -> tuple[int, int]:
        mark = self.marks[text[start:end]]
        while mark.takes_left and start > least and text[start - 1].isspace():
            start -= 1
        while mark.takes_right and end < len(text) and text[end].isspace():
            end += 1
        return start, end


class Hidden:
    """What stands for what, in one conversation."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._characters: dict[str, str] = {}

    def character(self, text: str) -> str:
        """That stands for `text` from now on."""
        if text not in self._characters:
            if len(self.texts) > LAST - FIRST:
                raise InvalidArgument("messages: too many different characters of private use", field="messages")
            self._characters[text] = chr(FIRST + len(self.texts))
            self.texts.append(text)
        return self._characters[text]

    def show(self, text: str) -> str:
        return HIDDEN.sub(self._shown, text)

    def _shown(self, found: re.Match[str]) -> str:
        number = ord(found[0]) - FIRST
        return self.texts[number] if number < len(self.texts) else found[0]


def unescape_private_use(json_text: str) -> str:
    """JSON in ASCII, but with characters of private use as they are: what stands for something must stay one."""
    return ESCAPED.sub(lambda found: found[1] + bytes.fromhex(found[2] + found[3]).decode("utf-16-be"), json_text)


def _mark(token: Mapping[str, Any]) -> Mark:
    return Mark(
        text=token["content"],
        special=token["special"],
        normalized=token["normalized"],
        alone=token["single_word"],
        takes_left=token["lstrip"],
        takes_right=token["rstrip"],
    )


def _is_mark(text: str, template: str, marks: set[str]) -> bool:
    """Added tokens are also ordinary text (runs of blanks, tags of HTML): only what the model's own form is made of."""
    return text in marks or (not text.isspace() and not text.isalnum() and text in template)


def _merge(parts: Iterable[tuple[str, bool]], hidden: Hidden) -> Iterator[TextSection]:
    """Neighbours with nothing hidden in one."""
    own: list[str] = []
    for text, is_mark in parts:
        if is_mark or HIDDEN.search(text) is None:
            own.append(text)
            continue
        if any(own):
            yield TextSection("".join(own), plain=False)
        own = []
        yield TextSection(hidden.show(text), plain=True)
    if any(own):
        yield TextSection("".join(own), plain=False)


def _replaced(text: str, spans: Sequence[tuple[int, int]], hidden: Hidden) -> str:
    if not spans:
        return text
    parts, position = [], 0
    for start, end in spans:
        parts += [text[position:start], hidden.character(text[start:end])]
        position = end
    return "".join([*parts, text[position:]])


def _spans_in(text: str, spellings: TextMatcher) -> list[tuple[int, int]]:
    """Of spellings, and of what could become one with what is written before or behind the text."""
    spans = list(spellings.spans(text))
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())  # many templates strip
    begun = spellings.begun(text, start)
    if begun > start:
        spans.insert(0, (start, min(begun, spans[0][0]) if spans else begun))
    opened = spellings.left_open(text, end)
    if opened < end:
        spans.append((max(opened, spans[-1][1]) if spans else opened, end))
    return [(first, last) for first, last in spans if first < last]
