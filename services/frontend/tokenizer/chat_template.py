"""Rendering of messages to prompt text with the model's Jinja template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.services.frontend.tokenizer.control_tokens import unescape_private_use
from quire.services.frontend.tokenizer.message_shapes.contents import last_text
from quire.shared.errors import InvalidArgument

Message = Mapping[str, Any]
COMPILE_ERRORS = (TemplateError, RecursionError, ValueError, SyntaxError)
RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
ERROR_CHARACTERS = 500


class _Generation(Extension):
    """Jinja tag {% generation %}...{% endgeneration %}, which marks the assistant's part for training; here only its
    content matters."""

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
    """Writes JSON; unlike jinja2's own filter, leaves <, > and non-ASCII characters alone, since a model reads them."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )
    return unescape_private_use(text) if ensure_ascii else text


def _listed(value: Any) -> list[Any]:
    """Converts the iterators that filters such as map return."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the sandboxed Jinja environment with the filters, functions and extensions that transformers gives
    templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


# Templates prepend these to a text with `+`, also where a vocabulary has no such token.
NO_TOKENS = {"bos_token": "", "eos_token": ""}


class ChatTemplate:
    """Chat template of a model; raises InvalidArgument for what the template refuses, and for everything if there is
    none."""

    def __init__(
        self,
        source: str | None,
        variables: Mapping[str, str],
        with_tools: str | None = None,
        named: Mapping[str, str] | None = None,
        label: str = "chat_template",
    ) -> None:
        """Checks the syntax of all templates, which are compiled on their first use.

        `with_tools`: the template of conversations that offer tools. `named`: others, which a request may choose.
        `label`: the name in errors.
        """
        self.variables = variables
        self.with_tools = with_tools
        self.default = source
        self.named = dict(named or {})
        self.label = label
        self.source = "".join(self.sources)
        for text in self.sources:
            _check_syntax(text, label)

    @property
    def sources(self) -> tuple[str, ...]:
        """Texts of all templates, without duplicates."""
        return tuple(dict.fromkeys(filter(None, (self.default, self.with_tools, *self.named.values()))))

    @property
    def supports_tools(self) -> bool:
        return "tools" in self.source

    def chosen(self, *, name: str = "", tools: bool = False) -> str:
        """Returns the source of the named template, else the one for tools if the conversation has some, else the
        default. Raises InvalidArgument for an unknown name, a template sent by the client, or a model without one."""
        if name and name not in self.named:
            available = f"available: {', '.join(sorted(self.named))}" if self.named else "the model has none"
            raise InvalidArgument(
                f"chat_template: a template cannot be sent with a request; name one of the model's; {available}",
                field="chat_template",
            )
        source = self.named[name] if name else self.with_tools if tools and self.with_tools else self.default
        if source is None:
            raise InvalidArgument("messages: this model has no chat template; send a prompt instead", field="messages")
        return source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        no_tools: Sequence[Mapping[str, Any]] | None = None,
        name: str = "",
    ) -> str:
        """Renders a conversation to the prompt's text.

        `no_tools`: the value of tools where there are none. `add_generation_prompt`: end with the start of the
        assistant's answer. `continue_final_message`: leave the last message open.
        """
        source = self.chosen(name=name, tools=bool(tools))
        scope = {
            "documents": None,  # templates test whether these are none
            **NO_TOKENS,
            **self.variables,
            **variables,
            "messages": messages,
            "tools": list(tools) or no_tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self.evaluate(source, scope)
        return _cut_after(text, messages[-1]) if continue_final_message else text

    def compiled(self, source: str) -> Template:
        """Returns the compiled template, cached by its source; raises InvalidArgument for the field `model` if it
        does not compile."""
        try:
            return _compiled(source)
        except COMPILE_ERRORS as error:
            raise _not_compiled(self.label, error) from None

    def evaluate(self, source: str, scope: Mapping[str, Any]) -> str:
        """Runs the template; raises InvalidArgument with a one-line message if it does not compile or refuses."""
        template = self.compiled(source)
        try:
            return template.render(scope)
        except RENDER_ERRORS as error:
            raise InvalidArgument(
                f"messages: the chat template {self.label} refuses them: {one_line(error)}", field="messages"
            ) from None


@lru_cache(maxsize=8)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


def _check_syntax(source: str, label: str) -> None:
    """Parses without compiling, which can take any time, since constant expressions are computed."""
    try:
        _environment().parse(source)
    except COMPILE_ERRORS as error:
        raise _not_compiled(label, error) from None


def _not_compiled(label: str, error: Exception) -> InvalidArgument:
    return InvalidArgument(f"model: its chat template {label} does not compile: {one_line(error)}", field="model")


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= ERROR_CHARACTERS else f"{text[:ERROR_CHARACTERS]}..."


def _cut_after(text: str, last: Message) -> str:
    """Cuts the text after the last message's content, so that the model continues it. Raises InvalidArgument if the
    template does not show that content."""
    content = last_text(last.get("content")).strip()
    at = text.rfind(content)
    if at < 0:
        raise InvalidArgument("continue_final_message: the template does not show the last message", field="messages")
    return text[: at + len(content)]
