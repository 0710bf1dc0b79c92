"""Messages to prompt text: the model's Jinja template, run in a sandbox that reaches no objects of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.frontend.tokenizer.folder import read_optional, special_tokens
from shared.errors import InvalidArgument

Message = Mapping[str, Any]


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own way to declare it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, leaves <, > and characters beyond ASCII alone: the reader is a model, not a browser."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """Refuses with InvalidArgument what the template refuses, and everything when the model has none."""

    def __init__(self, source: str | None, variables: Mapping[str, str]) -> None:
        self._template = self._compile(source) if source is not None else None
        self._variables = variables

    @staticmethod
    def _compile(source: str) -> Template:
        try:
            return _environment().from_string(source)
        except TemplateError as error:
            raise InvalidArgument(f"model: its chat template does not compile: {error}", field="model") from None

    def render(
        self, messages: Sequence[Message], *, open_turn: bool, continue_last: bool, variables: Mapping[str, Any]
    ) -> str:
        """`open_turn`: end with the start of the assistant's answer. `continue_last`: leave the last message open."""
        if self._template is None:
            raise InvalidArgument("messages: this model has no chat template; send a prompt instead", field="messages")
        scope = {**self._variables, **variables, "messages": messages, "add_generation_prompt": open_turn}
        try:
            text = self._template.render(scope)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise InvalidArgument(f"messages: the chat template refuses them: {error}", field="messages") from None
        return _cut_after(text, messages[-1]) if continue_last else text


def _cut_after(text: str, last: Message) -> str:
    content = str(last.get("content") or "").strip()
    at = text.rfind(content)
    if at < 0:
        raise InvalidArgument("continue_final_message: the template does not show the last message", field="messages")
    return text[: at + len(content)]


def load(folder: Path) -> ChatTemplate:
    """chat_template.jinja, else `chat_template` of tokenizer_config.json: one text, or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens(folder))
    written = read_optional(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(written, list):
        written = {entry["name"]: entry["template"] for entry in written}.get("default")
    return ChatTemplate(written, special_tokens(folder))
