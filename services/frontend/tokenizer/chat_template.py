"""Messages to prompt text: the model's Jinja template, run in a sandbox that reaches no objects of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.frontend.request.request import ChatPrompt
from services.frontend.tokenizer.control_tokens import show_private
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
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return show_private(text) if ensure_ascii else text


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

    def __init__(self, source: str | None, variables: Mapping[str, str], with_tools: str | None = None) -> None:
        """`with_tools`: another one, for conversations that offer tools."""
        self._template = _compiled(source) if source is not None else None
        self._with_tools = _compiled(with_tools) if with_tools is not None else self._template
        self.variables = variables
        self.with_tools = with_tools
        self.default = source
        self.source = (source or "") + (with_tools or "")

    @property
    def shows_tools(self) -> bool:
        return "tools" in self.source

    def text_of(self, prompt: ChatPrompt) -> str:
        if not prompt.messages:
            raise InvalidArgument("messages must hold at least one message", field="messages")
        return self.render(
            prompt.messages,
            tools=prompt.tools,
            open_turn=prompt.open_turn,
            continue_last=prompt.continue_last,
            variables=prompt.template_variables,
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        open_turn: bool,
        continue_last: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """`open_turn`: end with the start of the assistant's answer. `continue_last`: leave the last message open."""
        template = self._with_tools if tools else self._template
        if template is None:
            raise InvalidArgument("messages: this model has no chat template; send a prompt instead", field="messages")
        scope = {
            "documents": None,  # templates ask whether these are none
            **self.variables,
            **variables,
            "messages": messages,
            "tools": list(tools) or None,
            "add_generation_prompt": open_turn,
        }
        try:
            text = template.render(scope)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise InvalidArgument(f"messages: the chat template refuses them: {error}", field="messages") from None
        return _cut_after(text, messages[-1]) if continue_last else text


@lru_cache(maxsize=8)  # whoever guards a template compiles it again
def _compiled(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise InvalidArgument(f"model: its chat template does not compile: {error}", field="model") from None


def _cut_after(text: str, last: Message) -> str:
    content = str(last.get("content") or "").strip()
    at = text.rfind(content)
    if at < 0:
        raise InvalidArgument("continue_final_message: the template does not show the last message", field="messages")
    return text[: at + len(content)]


def load(folder: Path, override: str = "") -> ChatTemplate:
    """The file `override`, else chat_template.jinja, else `chat_template` of tokenizer_config.json: one text, or a list
    of named ones, of which `tool_use` is for conversations with tools."""
    variables = special_tokens(folder)
    file = Path(override) if override else folder / "chat_template.jinja"
    if override and not file.is_file():
        raise InvalidArgument(f"chat_template: there is no file {override!r}", field="chat_template")
    if file.exists():
        return ChatTemplate(file.read_text(encoding="utf-8"), variables)
    written = read_optional(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(written, list):
        named = {entry["name"]: entry["template"] for entry in written}
        return ChatTemplate(named.get("default"), variables, named.get("tool_use"))
    return ChatTemplate(written, variables)
