"""Rendering of a conversation by the chat template, in sections for the tokenizers that read them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer.chat_template import ChatTemplate
from quire.services.frontend.tokenizer.control_tokens import ControlTokens, TextSection
from quire.services.frontend.tokenizer.message_shapes import media_parts
from quire.services.frontend.tokenizer.message_shapes.probes import ShapeProbe
from quire.services.frontend.tokenizer.message_shapes.selection import Render, select_shape
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape
from quire.services.frontend.tokenizer.message_shapes.shaping import shape_messages, tools_for_template
from quire.shared.errors import InvalidArgument

PROBING_S = 5.0  # processor time for all templates of a model; real ones take 0.04 s


@dataclass(frozen=True, slots=True)
class RendererConfig:
    """Everything that a renderer needs, as it is sent to the child process."""

    template: str | None
    with_tools: str | None
    named: Mapping[str, str]
    label: str  # name of the template in errors
    variables: Mapping[str, str]
    added: Sequence[Mapping[str, Any]] = ()  # added tokens, as tokenizer.json has them
    marks: Iterable[str] = ()  # tokens that begin and end reasoning
    normalizer: Any = None  # from the tokenizers package
    guarded: bool = False  # texts of users cannot spell control tokens
    placeholders: Mapping[str, str] = field(default_factory=dict)  # tokens that stand for media, by modality
    probing_s: float = PROBING_S

    @classmethod
    def of(cls, template: ChatTemplate, **more: Any) -> RendererConfig:
        return cls(template.default, template.with_tools, template.named, template.label, template.variables, **more)

    def encode(self) -> bytes:
        return pickle.dumps(self)

    @classmethod
    def decode(cls, data: bytes) -> RendererConfig:
        renderer_config = pickle.loads(data)
        assert isinstance(renderer_config, cls)
        return renderer_config


class RenderedChat(NamedTuple):
    """Conversation as the tokenizers read it."""

    sections: list[TextSection]
    media: Sequence[int] = ()  # indexes of the prompt's media, in the order of their placeholders


class PromptRenderer:
    """Renderer of one model's conversations, in the message shape that its template reads."""

    def __init__(self, renderer_config: RendererConfig) -> None:
        self.renderer_config = renderer_config
        self.template = ChatTemplate(
            renderer_config.template,
            renderer_config.variables,
            renderer_config.with_tools,
            renderer_config.named,
            renderer_config.label,
        )
        normalize: Callable[[str], str] | None = None
        if renderer_config.normalizer is not None:
            normalize = renderer_config.normalizer.normalize_str
        self.control = ControlTokens(
            renderer_config.added,
            self.template.source,
            renderer_config.marks,
            normalize,
            [*renderer_config.placeholders.values()],
        )
        self._placeholders = renderer_config.placeholders
        self._shapes: dict[str, MessageShape] = {}  # by the template's text

    def shape(self, *, name: str = "", tools: bool = False) -> MessageShape:
        """Returns the message shape for the template of such conversations; the first call renders probes."""
        source = self.template.chosen(name=name, tools=tools)
        if source not in self._shapes:
            self.template.compiled(source)
            self._shapes[source] = select_shape(self._probed(source), source, self._placeholders)
        return self._shapes[source]

    @property
    def has_shapes(self) -> bool:
        """Whether the shapes of all templates have been selected."""
        return len(self._shapes) == len(self.template.sources)

    def shapes(self) -> dict[str, MessageShape]:
        """Probes all templates of the model and returns the message shape of each: `default`, `tool_use`, and the
        named ones; empty without a template."""
        if self.template.default is None and not self.template.named:
            return {}
        shapes = {"default": self.shape()} if self.template.default is not None else {}
        if self.template.with_tools:
            shapes["tool_use"] = self.shape(tools=True)
        return shapes | {name: self.shape(name=name) for name in self.template.named}

    def _probed(self, source: str) -> Render:
        """Returns a function that renders a probe's messages with the template `source`, without markers or
        protection."""
        scope = {"documents": None, **self.renderer_config.variables}

        def render(probe: ShapeProbe, messages: Sequence[Mapping[str, Any]], shape: MessageShape) -> str:
            shown = media_parts.for_template(messages, shape, self._placeholders)
            given = {"messages": shown, "tools": tools_for_template(probe.tools, shape)}
            return self.template.evaluate(
                source, scope | given | {"add_generation_prompt": probe.add_generation_prompt}
            )

        return render

    def sections(self, prompt: ChatPrompt) -> list[TextSection]:
        return self.render(prompt).sections

    def render(self, prompt: ChatPrompt) -> RenderedChat:
        """Converts the messages to the template's shape and renders them. Control tokens in users' texts end up in
        plain sections if the renderer is guarded. Raises InvalidArgument if the template refuses the messages."""
        if not prompt.messages:
            raise InvalidArgument("messages must contain at least one message", field="messages")
        shape = self.shape(name=prompt.template, tools=bool(prompt.tools))
        prompt = replace(prompt, messages=shape_messages(prompt.messages, shape))
        media = media_parts.order_of(prompt.messages)
        if not self.renderer_config.guarded:
            return RenderedChat([TextSection(self._text(prompt, shape), plain=False)], media)
        shown, hidden = self.control.hide(prompt)
        return RenderedChat(self.control.sections(self._text(shown, shape), hidden), media)

    def _text(self, prompt: ChatPrompt, shape: MessageShape) -> str:
        """Renders the conversation, whose messages already have the template's shape, to one text."""
        return self.template.render(
            media_parts.for_template(prompt.messages, shape, self._placeholders),
            tools=prompt.tools,
            no_tools=tools_for_template((), shape),
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final_message=prompt.continue_final_message,
            variables=prompt.template_variables,
            name=prompt.template,
        )
