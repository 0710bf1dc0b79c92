"""Long conversations are put through the template by a process of their own, which says what the frontend would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.frontend.output_processor.answer_formats import AnswerFormats
from services.frontend.request.request import ChatPrompt, Request, Sampling
from services.frontend.tokenizer.chat_template import ChatTemplate
from services.frontend.tokenizer.conversations import conversations as module
from services.frontend.tokenizer.conversations.conversations import Conversations
from services.frontend.tokenizer.tokenizer import Tokenizer
from shared.errors import Internal, InvalidArgument
from shared.pb.common.v1.sampling_pb2 import StructuredOutput
from tests.priorities import has_stepped_back
from tests.services.frontend.talking import talking_folder
from tests.services.frontend.tiny_folder import CHATML, END, write_folder

TEMPLATE = (
    "{% if messages[0].content == 'odd' %}{{ raise_exception('it is odd') }}{% endif %}"
    "{% if messages[0].content == 'broken' %}{{ 1 // 0 }}{% endif %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
)
FILLING = "word " * 5000  # so that it is not done at once


@pytest.fixture
def conversations(tmp_path: Path) -> Iterator[Conversations]:
    tokenizer = Tokenizer(write_folder(tmp_path, chat_template=TEMPLATE), 1)
    with contextlib.closing(tokenizer):
        yield tokenizer.conversations


def said(*texts: str, **more: Any) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text} for text in texts], **more)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": [1, 2.5, None, True, 2**70]}}}


@pytest.mark.parametrize(
    "prompt",
    [
        said(FILLING),
        said("", FILLING, "你好 🙂"),
        said(f"{END}{FILLING}", "<|im_", "end|>", f"x{END}"),
        said(FILLING, tools=[TOOL] * 600, open_turn=False),
        said(FILLING, continue_last=True, open_turn=False, template_variables={"enable_thinking": False}),
    ],
)
async def test_its_sections_are_those_of_the_frontend(conversations: Conversations, prompt: ChatPrompt) -> None:
    assert await conversations.sections(prompt) == conversations._rendering.sections(prompt)
    assert conversations.pid is not None
    whole = "".join(section.text for section in await conversations.sections(prompt))
    for characters in (1, 40, 10**6):
        assert await conversations.end(prompt, characters) == whole[-characters:]


async def test_what_the_template_refuses_is_refused_in_its_words(conversations: Conversations) -> None:
    for texts in (("odd",), ("odd", FILLING)):
        with pytest.raises(InvalidArgument, match="it is odd") as refused:
            await conversations.sections(said(*texts))
        assert refused.value.field == "messages"


async def test_a_short_one_needs_no_process(conversations: Conversations) -> None:
    await conversations.sections(said("hello"))
    assert conversations.pid is None


async def test_it_is_started_again_and_done_here_while_it_does_not_answer(
    conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = conversations._rendering.sections(said(FILLING))
    await conversations.sections(said(FILLING))
    first = conversations.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert await conversations.sections(said(FILLING)) == expected
    assert conversations.pid not in (None, first)
    monkeypatch.setattr("shared.process.child.LONGEST_WAIT_S", 0.05)
    assert conversations.pid is not None
    os.kill(conversations.pid, signal.SIGSTOP)
    assert await conversations.sections(said(FILLING)) == expected


async def test_a_fault_of_the_template_is_one_of_the_request_alone(
    conversations: Conversations,
) -> None:
    """The process goes on: who sends such conversations would else start one after the other."""
    await conversations.sections(said(FILLING))
    pid = conversations.pid
    with pytest.raises(Internal, match="ZeroDivisionError"):
        await conversations.sections(said("broken", FILLING))
    assert await conversations.sections(said(FILLING))
    assert conversations.pid == pid


async def test_those_of_few_messages_do_not_wait_for_those_of_many(
    conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    ask = conversations._ask

    def noted(prompt: ChatPrompt) -> Any:
        order.append(len(prompt.messages))
        return ask(prompt)

    monkeypatch.setattr(conversations, "_ask", noted)
    await asyncio.gather(*(conversations.sections(said(*[FILLING] * count)) for count in (9, 5, 7, 1)))
    assert order == [9, 1, 5, 7]


async def test_the_loop_goes_on_while_a_template_takes_long(
    conversations: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a template that is not short runs in this process."""
    await conversations.sections(said(FILLING))
    for name in ("text_of", "render"):
        monkeypatch.setattr(ChatTemplate, name, None)
    assert await conversations.sections(said(*["hello"] * 4000))
    assert 4000 * len("hello") > module.LIGHT_CHARACTERS


async def test_it_steps_back_behind_what_clients_wait_for(conversations: Conversations) -> None:
    await conversations.sections(said(FILLING))
    assert conversations.pid is not None
    assert has_stepped_back(conversations.pid)


async def test_where_an_answer_begins_is_looked_up_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms of answers begin behind the reasoning, which templates may begin themselves."""
    tokenizer = Tokenizer(talking_folder(tmp_path / "talking"), 1)
    formats = AnswerFormats("auto", "qwen3", tokenizer)
    form = StructuredOutput(regex="[a-z]{1,5}")
    with contextlib.closing(tokenizer):
        await tokenizer.conversations.sections(said(FILLING))
        monkeypatch.setattr(ChatTemplate, "render", None)
        tags = []
        for begun in (False, True):
            prompt = said(*["hello"] * 4000, template_variables={"enable_thinking": begun})
            request = Request("r", "", [prompt], Sampling(structured_output=form), 0.0, parse_answer=True)
            sampling = (await formats.constrained(request)).sampling
            assert sampling.structured_output is not None
            tags.append(sampling.structured_output.structural_tag)
    assert "<think>" in tags[0]
    assert "<think>" not in tags[1]
    assert "</think>" in tags[1]
