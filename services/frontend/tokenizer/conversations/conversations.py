"""Conversations to sections of text: short ones at once, the others in a process of their own.

Templates are Python, and so is the search for control tokens. In a thread they would share the interpreter's lock with
the event loop; worse, a thread that steps back could be left without a processor while it has that lock.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from services.frontend.bounds.prompts import characters_of
from services.frontend.bounds.turns import SmallestFirst
from services.frontend.request.request import ChatPrompt
from services.frontend.tokenizer.control_tokens import TextSection
from services.frontend.tokenizer.conversations import rendering_process
from services.frontend.tokenizer.conversations.rendering import Rendering
from shared.errors import Internal
from shared.logs import logger
from shared.process.child import Child, ChildEnded

log = logger("conversations")

LIGHT_CHARACTERS = 1 << 14  # a template that shows so many takes under a millisecond


class Conversations:
    """Owns the process, which is asked about one conversation after the other, those of few messages first."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._child = Child(rendering_process.__name__, rendering.introduction.encode())
        self._thread = ThreadPoolExecutor(1, "conversations")
        self._turns = SmallestFirst(1)

    async def sections(self, prompt: ChatPrompt) -> list[TextSection]:
        """Raises InvalidArgument."""
        if characters_of(prompt, LIGHT_CHARACTERS) <= LIGHT_CHARACTERS:
            return self._rendering.sections(prompt)
        async with self._turns.turn(len(prompt.messages) + len(prompt.tools)):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, prompt)

    async def end(self, prompt: ChatPrompt, characters: int) -> str:
        """The last so many characters, at most, of all sections. Raises InvalidArgument."""
        text = ""
        for section in reversed(await self.sections(prompt)):
            text = section.text[-characters:] + text
            if len(text) >= characters:
                break
        return text[-characters:]

    def _ask(self, prompt: ChatPrompt) -> list[TextSection]:
        try:
            answer = self._child.ask(rendering_process.question(prompt))
        except (ChildEnded, Internal, OSError) as error:  # it is done here then
            log.warning("the process that runs the template does not answer", reason=str(error))
            return self._rendering.sections(prompt)
        return rendering_process.decode(answer)

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._child.pid

    def start(self) -> None:
        """Before anybody needs it."""
        self._thread.submit(self._child.start)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._child.close()
