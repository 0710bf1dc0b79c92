"""Rendering of conversations to sections of text in child processes.

Templates are code from a model's folder, and the search for control tokens is Python as well. In a thread they would
share the GIL with the event loop and could not be stopped. Two processes run them: one for short conversations, with a
small budget for each, and one for the others and for those that exceed that budget.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.services.frontend.bounds.prompts import characters_of
from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer.chat_rendering import limits
from quire.services.frontend.tokenizer.chat_rendering.prompt_renderer import RenderedChat, RendererConfig
from quire.services.frontend.tokenizer.chat_rendering.rendering_process import RenderBudgetExceeded
from quire.services.frontend.tokenizer.chat_rendering.template_runner import RenderBudgets, TemplateRunner
from quire.services.frontend.tokenizer.control_tokens import TextSection
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger

log = logger("conversations")

LIGHT_CHARACTERS = 1 << 14  # a template with a conversation of this size takes about a millisecond
DEFAULT_BUDGETS = RenderBudgets()


class ChatRenderer:
    """Owner of the processes that run one model's template."""

    def __init__(self, renderer_config: RendererConfig, budgets: RenderBudgets = DEFAULT_BUDGETS) -> None:
        self._label, self._budgets = renderer_config.label, budgets
        self.light = TemplateRunner(renderer_config, budgets.light, budgets.probing)
        self._heavy = TemplateRunner(renderer_config, budgets.heavy, budgets.probing)

    async def sections(self, prompt: ChatPrompt) -> list[TextSection]:
        return (await self.render(prompt)).sections

    async def render(self, prompt: ChatPrompt) -> RenderedChat:
        """Renders a conversation in the light process if it is short, and in the heavy one if it is long or exceeds
        the light budget. Raises InvalidArgument if the template refuses it or takes too long."""
        try:
            if characters_of(prompt, LIGHT_CHARACTERS) <= LIGHT_CHARACTERS:
                return await self.light.render(prompt)
        except RenderBudgetExceeded:
            log.info(
                "the chat template exceeded its budget for short conversations; rendering in a process of its own",
                template=self._label,
            )
        try:
            return await self._heavy.render(prompt)
        except RenderBudgetExceeded:
            raise limits.cpu_time_error(self._label, self._budgets.heavy.processor_s) from None

    async def prompt_end(self, prompt: ChatPrompt, characters: int) -> str:
        """Renders the conversation and returns at most the last `characters` characters of the text; raises
        InvalidArgument as `sections` does."""
        text = ""
        for section in reversed(await self.sections(prompt)):
            text = section.text[-characters:] + text
            if len(text) >= characters:
                break
        return text[-characters:]

    @property
    def pids(self) -> tuple[int | None, int | None]:
        """Ids of the processes for short and for other conversations; None where none runs."""
        return self.light.pid, self._heavy.pid

    def start(self) -> None:
        """Starts the processes, so that no request waits for it, and logs the shape of messages."""
        self.light.thread.submit(self._report)
        self._heavy.thread.submit(self._begin_heavy)

    def shapes(self) -> Mapping[str, MessageShape]:
        """Waits until the templates have been probed and returns their message shapes by name; blocks. Raises
        InvalidArgument if the template cannot be used."""
        return self.light.thread.submit(self.light.shapes).result()

    def _report(self) -> None:
        """Logs the shapes of messages that the template reads, or the error if it cannot be used; never raises that
        error."""
        try:
            shapes = self.light.shapes()
        except InvalidArgument as error:
            log.error("cannot use the chat template", template=self._label, reason=error.message)
            return
        for name, shape in shapes.items():
            log.info("chat template", template=self._label, name=name, **shape.as_fields())

    def _begin_heavy(self) -> None:
        """Probes the template in the second process ahead of its first conversation; its refusal is only logged."""
        try:
            self._heavy.shapes()
        except InvalidArgument:
            log.debug("the second rendering process cannot use the chat template either", template=self._label)

    def close(self) -> None:
        self.light.close()
        self._heavy.close()
