"""Tests of the rendering of conversations in child processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from quire.services.frontend.output_processor.answer_formats import AnswerFormats
from quire.services.frontend.request.request import ChatPrompt, Request, Sampling
from quire.services.frontend.tokenizer.chat_rendering.chat_renderer import ChatRenderer
from quire.services.frontend.tokenizer.chat_rendering.prompt_renderer import PromptRenderer, RendererConfig
from quire.services.frontend.tokenizer.chat_rendering.template_runner import RenderBudget, RenderBudgets
from quire.services.frontend.tokenizer.chat_template import ChatTemplate
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1.sampling_pb2 import StructuredOutput
from tests.observing import calls_of
from tests.priorities import has_stepped_back
from tests.services.frontend.tiny_folder import CHATML, END, byte_level_tokenizer, write_folder
from tests.services.frontend.tokenizer.template_families import source
from tests.services.frontend.tool_model import tool_model_folder
from tests.waiting import eventually, has_ended

TEMPLATE = (
    "{% if messages[0].content == 'odd' %}{{ raise_exception('it is odd') }}{% endif %}"
    "{% if messages[0].content == 'broken' %}{{ 1 // 0 }}{% endif %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + CHATML
)
FILLING = "word " * 5000  # keeps the process busy for a while


@pytest.fixture
def conversations(tmp_path: Path) -> Iterator[ChatRenderer]:
    tokenizer = Tokenizer(write_folder(tmp_path, chat_template=TEMPLATE), 1)
    with contextlib.closing(tokenizer):
        yield tokenizer.chat_renderer


def local_renderer() -> PromptRenderer:
    """Returns a renderer with the same configuration in this process."""
    added = [
        {"content": text, "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
        for text in ("<|im_start|>", END)
    ]
    return PromptRenderer(RendererConfig(TEMPLATE, None, {}, "it", {"eos_token": END}, added, (), None, guarded=True))


def chat_prompt(*texts: str, **more: Any) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text} for text in texts], **more)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": [1, 2.5, None, True, 2**70]}}}


@pytest.mark.parametrize(
    "prompt",
    [
        chat_prompt(FILLING),
        chat_prompt("", FILLING, "你好 🙂"),
        chat_prompt(f"{END}{FILLING}", "<|im_", "end|>", f"x{END}"),
        chat_prompt(FILLING, tools=[TOOL] * 600, add_generation_prompt=False),
        chat_prompt(
            FILLING,
            continue_final_message=True,
            add_generation_prompt=False,
            template_variables={"enable_thinking": False},
        ),
    ],
)
async def test_sections_equal_the_templates(conversations: ChatRenderer, prompt: ChatPrompt) -> None:
    assert await conversations.sections(prompt) == local_renderer().sections(prompt)
    whole = "".join(section.text for section in await conversations.sections(prompt))
    for characters in (1, 40, 10**6):
        assert await conversations.prompt_end(prompt, characters) == whole[-characters:]


async def test_gemmas_normalizer_reaches_the_processes(tmp_path: Path) -> None:
    """It is a Replace alone, which tokenizers pickles and cannot read again."""
    gemma = byte_level_tokenizer()
    gemma.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer = Tokenizer(write_folder(tmp_path, tokenizer=gemma, chat_template=TEMPLATE), 1)
    with contextlib.closing(tokenizer):
        for text in ("hello", FILLING):
            sections = await tokenizer.chat_renderer.sections(chat_prompt(text))
            assert sections == local_renderer().sections(chat_prompt(text))


async def test_a_refusal_has_the_templates_message(conversations: ChatRenderer) -> None:
    for texts in (("odd",), ("odd", FILLING)):
        with pytest.raises(InvalidArgument, match="it is odd") as refused:
            await conversations.sections(chat_prompt(*texts))
        assert refused.value.field == "messages"


async def test_a_process_that_is_killed_is_started_again(conversations: ChatRenderer) -> None:
    expected = local_renderer().sections(chat_prompt(FILLING))
    for prompt, place in ((chat_prompt(FILLING), 1), (chat_prompt("hello"), 0)):
        assert await conversations.sections(prompt)
        first = conversations.pids[place]
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda first=first: has_ended(first))
        assert await conversations.sections(prompt) == local_renderer().sections(prompt)
        assert conversations.pids[place] not in (None, first)
    assert await conversations.sections(chat_prompt(FILLING)) == expected


async def test_short_conversations_of_a_stopped_process_are_rendered_by_the_other(tmp_path: Path) -> None:
    budgets = RenderBudgets(light=RenderBudget(1.0, 0.5))
    tokenizer = Tokenizer(write_folder(tmp_path, chat_template=TEMPLATE), 1, render_budgets=budgets)
    with contextlib.closing(tokenizer):
        await check_that_the_other_renders(tokenizer.chat_renderer)


async def check_that_the_other_renders(conversations: ChatRenderer) -> None:
    """Stops the process for short conversations and checks that the other one renders one."""
    expected = await conversations.sections(chat_prompt("hello"))
    pid = conversations.pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert await conversations.sections(chat_prompt("hello")) == expected
    assert conversations.pids[0] is None


async def test_template_errors_fail_only_their_request(conversations: ChatRenderer) -> None:
    """Checks that the process survives: otherwise each such conversation would start another one."""
    await conversations.sections(chat_prompt(FILLING))
    pids = conversations.pids
    with pytest.raises(InvalidArgument, match=r"refuses them: .*zero"):
        await conversations.sections(chat_prompt("broken", FILLING))
    assert await conversations.sections(chat_prompt(FILLING))
    assert conversations.pids == pids


async def test_short_conversations_are_rendered_before_long_ones(conversations: ChatRenderer) -> None:
    order: list[int] = []

    async def render(count: int) -> None:
        await conversations.sections(chat_prompt(*[FILLING] * count))
        order.append(count)

    await asyncio.gather(*(render(count) for count in (9, 5, 7, 1)))
    assert order == [9, 1, 5, 7]


async def test_templates_do_not_run_in_this_process(conversations: ChatRenderer) -> None:
    with calls_of(ChatTemplate.render, ChatTemplate.evaluate) as calls:
        assert await conversations.sections(chat_prompt(*["hello"] * 4000))
        assert await conversations.sections(chat_prompt("hello"))
    assert not calls


def test_the_message_shape_is_logged_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire.conversations")
    for template, expected in ((source("mistral nemo"), "nine"), (source("qwen2.5"), "given")):
        caplog.clear()
        with contextlib.closing(Tokenizer(write_folder(tmp_path, chat_template=template), 1)) as tokenizer:
            tokenizer.chat_renderer.start()
            assert tokenizer.chat_renderer.shapes()["default"].call_ids == expected
        (line,) = [record for record in caplog.records if record.getMessage() == "chat template"]
        assert line.__dict__["values"] | {"name": "default", "call_ids": expected} == line.__dict__["values"]
        assert line.__dict__["values"]["template"] == "tokenizer_config.json"


def test_a_template_that_does_not_compile_is_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_folder(tmp_path, chat_template="{{ messages | no_such_filter }}")
    with contextlib.closing(Tokenizer(folder, 1)) as tokenizer:
        tokenizer.chat_renderer.start()
        with pytest.raises(InvalidArgument, match=r"tokenizer_config\.json does not compile: No filter named"):
            tokenizer.chat_renderer.shapes()
    assert [record.levelname for record in caplog.records if record.name == "quire.conversations"] == ["ERROR"]


async def test_the_processes_have_a_lower_priority(conversations: ChatRenderer) -> None:
    await conversations.sections(chat_prompt(FILLING))
    await conversations.sections(chat_prompt("hello"))
    for pid in conversations.pids:
        assert pid is not None
        assert has_stepped_back(pid)


async def test_the_answer_start_is_determined_in_the_process(tmp_path: Path) -> None:
    """Checks that formats of answers apply after the reasoning, which templates may begin themselves."""
    tokenizer = Tokenizer(tool_model_folder(tmp_path / "talking"), 1)
    formats = AnswerFormats("auto", "qwen3", tokenizer)
    form = StructuredOutput(regex="[a-z]{1,5}")
    with contextlib.closing(tokenizer), calls_of(ChatTemplate.render) as renderings:
        await tokenizer.chat_renderer.sections(chat_prompt(FILLING))
        tags = []
        for begun in (False, True):
            prompt = chat_prompt(*["hello"] * 4000, template_variables={"enable_thinking": begun})
            request = Request("r", "", [prompt], Sampling(structured_output=form), 0.0, parse_answer=True)
            sampling = (await formats.with_constraint(request)).sampling
            assert sampling.structured_output is not None
            tags.append(sampling.structured_output.structural_tag)
    assert not renderings
    assert "<think>" in tags[0]
    assert "<think>" not in tags[1]
    assert "</think>" in tags[1]
