"""Tests that templates with endless loops or huge memory use end with one line, while other calls are answered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer.chat_rendering import template_runner
from quire.services.frontend.tokenizer.chat_rendering.chat_renderer import ChatRenderer
from quire.services.frontend.tokenizer.chat_rendering.template_runner import RenderBudget, RenderBudgets
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument
from tests.services.frontend.tiny_folder import CHATML, write_folder
from tests.waiting import eventually, loop_turns

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "nested loops": (LOOP, "takes more than"),
    "a power": ("{% set x = 10 %}{{ x ** (x ** 9) }}", "takes more than"),
    "a power that is a constant": ("{{ 10 ** (10 ** 9) }}", "takes more than"),
    "a macro that calls itself": (
        "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}",
        "recursion|takes more than",
    ),
}
LARGE = {
    "a repeated text": "{{ 'a' * 10 ** 9 }}",
    "a repeated text that is a constant": "{{ 'a' * 1000000000 }}",
    "a centered text": "{% for x in range(9) %}{{ 'a' | center(900000000) }}{% endfor %}",
    "a text that doubles": "{% set n = namespace(t='aaaaaaaa') %}{% for i in range(40) %}"
    "{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "a list that doubles": "{% set n = namespace(t=[1, 2, 3]) %}{% for i in range(40) %}"
    "{% set n.t = n.t + n.t %}{% endfor %}{{ n.t | length }}",
}


def chat_prompt(*texts: str) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text} for text in texts])


NEVER_S = 3600.0
SEVERAL_TICKS = 100  # one second: starting takes less


# Limits of the processor time only, so that other load of the machine has no influence.
SHORT = RenderBudgets(RenderBudget(0.5, NEVER_S), RenderBudget(0.05, NEVER_S), RenderBudget(0.2, NEVER_S))
# Doubling a text up to the memory limit takes half a second of processor time on a slow machine.
LONG = RenderBudgets(RenderBudget(60.0, NEVER_S), RenderBudget(0.05, NEVER_S), RenderBudget(60.0, NEVER_S))


def tokenizer_with(tmp_path: Path, template: str, budgets: RenderBudgets = SHORT) -> Tokenizer:
    folder = write_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(folder, 1, render_budgets=budgets)


@pytest.mark.parametrize(
    ("template", "words", "budgets"),
    [
        *((template, words, SHORT) for template, words in ENDLESS.values()),
        *((template, "MiB|refuses|maximum", LONG) for template in LARGE.values()),
    ],
    ids=[*ENDLESS, *LARGE],
)
async def test_it_ends_with_one_line_that_names_the_template(
    tmp_path: Path, template: str, words: str, budgets: RenderBudgets
) -> None:
    with contextlib.closing(tokenizer_with(tmp_path, template, budgets)) as tokenizer:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=words) as refused:
                await tokenizer.chat_renderer.sections(chat_prompt("hello"))
            assert "chat_template.jinja" in refused.value.message
            assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "template",
    [text for name, (text, _) in ENDLESS.items() if "constant" not in name]
    + [text for name, text in LARGE.items() if "constant" not in name],
)
async def test_the_time_limit_does_not_delay_other_conversations(tmp_path: Path, template: str) -> None:
    """Checks a template that is harmless until a message has a certain word, and constants computed before that."""
    hidden = "{% if messages[0].content == 'bomb' %}" + template + "{% endif %}" + CHATML
    with contextlib.closing(tokenizer_with(tmp_path, hidden)) as tokenizer:
        await tokenizer.chat_renderer.sections(chat_prompt("hello"))
        bombs = [asyncio.ensure_future(tokenizer.chat_renderer.sections(chat_prompt("bomb"))) for _ in range(2)]
        answers = [tokenizer.chat_renderer.sections(chat_prompt("hello", str(number))) for number in range(20)]
        texts = [sections[0].text for sections in await asyncio.gather(*answers)]
        assert all(f"\n{number}<" in text for number, text in enumerate(texts))
        for result in await asyncio.gather(*bombs, return_exceptions=True):
            assert isinstance(result, InvalidArgument)
            assert "chat_template.jinja" in result.message
        assert await tokenizer.chat_renderer.sections(chat_prompt("hello"))


async def test_templates_do_not_block_the_event_loop(tmp_path: Path) -> None:
    with contextlib.closing(tokenizer_with(tmp_path, LOOP)) as tokenizer:
        waiting = asyncio.ensure_future(tokenizer.chat_renderer.sections(chat_prompt("hello")))
        turns, started = 0, time.thread_time()
        while not waiting.done():
            await loop_turns()
            turns += 1
        assert turns > 100
        assert time.thread_time() >= started
        with pytest.raises(InvalidArgument):
            waiting.result()


async def test_a_process_that_is_killed_is_replaced_and_reaped(tmp_path: Path) -> None:
    """Kills the process while it renders, twice: the second process gets the same conversation."""
    patient = replace(SHORT, light=RenderBudget(NEVER_S, NEVER_S))
    hidden = "{% if messages[0].content == 'bomb' %}" + LOOP + "{% endif %}" + CHATML
    with contextlib.closing(tokenizer_with(tmp_path, hidden, patient)) as tokenizer:
        conversations = tokenizer.chat_renderer
        assert await conversations.sections(chat_prompt("hello"))
        waiting = asyncio.ensure_future(conversations.sections(chat_prompt("bomb")))
        killed: list[int] = []
        for _ in range(template_runner.ATTEMPTS):
            pid = await _one_that_computes(conversations, killed)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        with pytest.raises(InvalidArgument, match=r"chat_template\.jinja"):
            await waiting
        assert await conversations.sections(chat_prompt("hello"))
        assert conversations.pids[0] not in killed
        assert not [pid for pid in killed if _is_there(pid)]


async def _one_that_computes(conversations: ChatRenderer, killed: list[int]) -> int:
    """Returns the process for short conversations, once it has spent several ticks on one."""
    first: dict[int, int] = {}

    def computing() -> int:
        pid = conversations.pids[0]
        if pid is None or pid in killed:
            return 0
        used = _ticks(pid)
        return pid if used >= first.setdefault(pid, used) + SEVERAL_TICKS else 0

    return await eventually(computing)


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _ticks(pid: int) -> int:
    """Returns the processor time that a process has used; 0 for an ended one."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
    except OSError:
        return 0


async def test_too_deeply_nested_templates_do_not_compile(tmp_path: Path) -> None:
    deep = "{% if a %}" * 5000 + "{% endif %}" * 5000
    with pytest.raises(InvalidArgument, match=r"chat_template\.jinja does not compile") as refused:
        tokenizer_with(tmp_path, deep)
    assert "\n" not in refused.value.message
