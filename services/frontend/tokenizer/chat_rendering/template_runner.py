"""Child process that runs one model's chat template, and the queue of conversations before it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter
from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer.chat_rendering import limits, rendering_process
from quire.services.frontend.tokenizer.chat_rendering.prompt_renderer import PROBING_S, RenderedChat, RendererConfig
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape
from quire.shared.errors import InvalidArgument
from quire.shared.process.child import Child, ChildEnded

ATTEMPTS = 2  # the process can be killed from outside


@dataclass(frozen=True, slots=True)
class RenderBudget:
    """Time limits of one conversation."""

    processor_s: float
    elapsed_s: float  # the process is killed after this time


@dataclass(frozen=True, slots=True)
class RenderBudgets:
    """Budgets of one model's templates: for probing them, for short conversations, and for all others."""

    probing: RenderBudget = RenderBudget(PROBING_S, 20.0)
    light: RenderBudget = RenderBudget(processor_s=0.05, elapsed_s=2.0)
    heavy: RenderBudget = RenderBudget(processor_s=10.0, elapsed_s=60.0)


class TemplateRunner:
    """Owner of the child process, which renders one conversation after the other, those of few messages first."""

    def __init__(self, renderer_config: RendererConfig, budget: RenderBudget, probing: RenderBudget) -> None:
        self._label = renderer_config.label
        self._child = Child(
            rendering_process.__name__, replace(renderer_config, probing_s=probing.processor_s).encode()
        )
        self._budget, self._probing = budget, probing
        self._thread = ThreadPoolExecutor(1, "conversations")
        self._turns = SmallestFirstLimiter(1)
        self._shapes: Mapping[str, MessageShape] = {}
        self._refused: InvalidArgument | None = None  # error of the template itself

    async def render(self, prompt: ChatPrompt) -> RenderedChat:
        """Renders a conversation; raises InvalidArgument, and RenderBudgetExceeded when the budget is used up."""
        async with self._turns.slot(len(prompt.messages) + len(prompt.tools)):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._render, prompt)

    def _render(self, prompt: ChatPrompt) -> RenderedChat:
        question = rendering_process.question(prompt, self._budget.processor_s)
        self.shapes()
        return rendering_process.decode(self._ask(question, self._budget))

    def shapes(self) -> Mapping[str, MessageShape]:
        """Starts a process if none runs, and returns the selected message shapes by the template's name.

        Raises InvalidArgument if the template is unusable.
        """
        if self._refused is not None:
            raise self._refused
        if self._child.pid is None:
            self._shapes = self._chosen()
        return self._shapes

    def _chosen(self) -> Mapping[str, MessageShape]:
        """Asks the child for the templates' shapes. A template that is refused or too slow closes the child; its
        error is kept and raised now and for all later conversations."""
        try:
            return rendering_process.decode_shapes(self._ask(rendering_process.SHAPES, self._probing))
        except rendering_process.RenderBudgetExceeded:
            self._refused = limits.cpu_time_error(self._label, self._probing.processor_s)
        except InvalidArgument as error:
            self._refused = error
        self._child.close()
        raise self._refused

    def _ask(self, question: bytes, budget: RenderBudget) -> bytes:
        """Asks the child, again if it died, up to ATTEMPTS times. Raises RenderBudgetExceeded at the time limit, and
        the memory error if the process died each time."""
        for _ in range(ATTEMPTS):
            try:
                return self._child.ask(question, budget.elapsed_s)
            except ChildEnded as ended:
                if ended.status in (None, -signal.SIGXCPU):
                    raise rendering_process.RenderBudgetExceeded from None
        raise limits.memory_error(self._label)  # the process was killed, or could not even report the error

    @property
    def pid(self) -> int | None:
        """Id of the child process, if one runs."""
        return self._child.pid

    @property
    def thread(self) -> ThreadPoolExecutor:
        """Thread that communicates with the process."""
        return self._thread

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._child.close()
