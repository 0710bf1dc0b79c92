"""Tests of the fields by which several vendors' clients control reasoning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import ASK, TEMPLATE, tool_model_folder, tool_server

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
OPEN = "<think>\n"
ON: list[dict[str, Any]] = [
    {"enable_thinking": True},  # DashScope, SiliconFlow
    {"thinking": {"type": "enabled"}},  # DeepSeek, GLM, Kimi
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "adaptive"}},
    {"thinking": True},
    {"thinking": "enabled"},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
    {"extra_body": {"enable_thinking": True}},
    {"chat_template_args": {"enable_thinking": True}},  # Baseten, as OpenCode sends it
    {"reasoning": {"effort": "high"}},  # OpenRouter
    {"reasoning": {"enabled": True}},
    {"reasoning": "low"},
    {"think": True},  # Ollama
    {"think": "high"},
    {"enable_thinking": True, "reasoning_effort": "none"},
    {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
]
OFF: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": None, "thinking": None, "reasoning": None, "think": None},
    {"thinking": {"type": "disabled"}},
    {"thinking": {"type": "auto"}},
    {"thinking": False},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}, "reasoning_effort": "high"},
    {"think": False},
    {"enable_thinking": False, "thinking": {"type": "enabled"}},
    {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


async def submitted(folder: Path, path: str, *bodies: dict[str, Any]) -> list[Any]:
    """Returns the submission of each body; asserts that all are answered."""
    asked: dict[str, Any] = {"messages": ASK} if path == CHAT else {"input": "How is the weather?"}
    async with tool_server(folder, "ok") as (frontend, _, script):
        for body in bodies:
            answer = await frontend.http.post(path, json={"model": folder.name, **asked, **body})
            assert answer.status_code == 200, (body, answer.text)
        return list(script.submissions)


async def test_each_switch_for_reasoning_opens_it(tool_model: Path) -> None:
    for body, submission in zip(ON, await submitted(tool_model, CHAT, *ON), strict=True):
        assert prompt_text(tool_model, prompt_of(submission)).endswith(OPEN), body


async def test_each_switch_against_reasoning_omits_it(tool_model: Path) -> None:
    for body, submission in zip(OFF, await submitted(tool_model, CHAT, *OFF), strict=True):
        assert not prompt_text(tool_model, prompt_of(submission)).endswith(OPEN), body


async def test_responses_know_the_same_switches(tool_model: Path) -> None:
    switches: list[dict[str, Any]] = [{"enable_thinking": True}, {"thinking": {"type": "enabled"}}, {"thinking": False}]
    found = await submitted(tool_model, RESPONSES, *switches)
    assert [prompt_text(tool_model, prompt_of(one)).endswith(OPEN) for one in found] == [True, True, False]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 32}}, 32),
        ({"enable_thinking": True, "thinking_budget": 48}, 48),
        ({"reasoning": {"max_tokens": 64}}, 64),
        ({"thinking_token_budget": 5, "thinking_budget": 48}, 5),
        ({"thinking": {"type": "disabled", "budget_tokens": 32}}, None),
    ],
)
async def test_a_budget_reaches_the_scheduler(tool_model: Path, body: dict[str, Any], tokens: int | None) -> None:
    (submission,) = await submitted(tool_model, CHAT, body)
    sampling = submission.sampling
    assert (sampling.thinking_token_budget if sampling.HasField("thinking_token_budget") else None) == tokens


async def test_template_variables_are_sent_with_the_object(tmp_path: Path) -> None:
    shows = "{% if clear_thinking is defined %}clear={{ clear_thinking }}{% endif %}"
    folder = tool_model_folder(tmp_path / "cleared", TEMPLATE + shows)
    kept, plain = await submitted(
        folder, CHAT, {"thinking": {"type": "enabled", "clear_thinking": False}}, {"thinking": {"type": "enabled"}}
    )
    assert prompt_text(folder, prompt_of(kept)).endswith("clear=False")
    assert "clear=" not in prompt_text(folder, prompt_of(plain))


async def test_reasoning_that_is_excluded_is_not_shown(tool_model: Path) -> None:
    async with tool_server(tool_model, "<think>2</think>4") as (frontend, _, _script):
        body = {"model": "talking", "messages": ASK, "reasoning": {"exclude": True}}
        (choice,) = (await frontend.http.post(CHAT, json=body)).json()["choices"]
    assert choice["message"]["content"] == "4"
    assert not choice["message"].get("reasoning")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"budget_tokens": 5}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking_token_budget"),
        ({"enable_thinking": "perhaps"}, "enable_thinking"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ],
)
async def test_a_wrong_value_is_named(tool_model: Path, body: dict[str, Any], field: str) -> None:
    async with tool_server(tool_model, "ok") as (frontend, _, _script):
        answer = await frontend.http.post(CHAT, json={"model": "talking", "messages": ASK, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize("name", ["prefix", "partial"])
async def test_a_message_marked_as_a_beginning_is_continued(tool_model: Path, name: str) -> None:
    """Checks a request for the rest of an answer that was cut, as aider sends it."""
    beginning: dict[str, Any] = {"role": "assistant", "content": "It is"}
    marked, plain, earlier = await submitted(
        tool_model,
        CHAT,
        {"messages": [*ASK, {**beginning, name: True}]},
        {"messages": [*ASK, {**beginning, name: False}]},
        {"messages": [*ASK, {**beginning, name: True}, *ASK]},
    )
    ends = [prompt_text(tool_model, prompt_of(one)).rpartition("<|im_start|>")[2] for one in (marked, plain, earlier)]
    assert ends == ["assistant\nIt is", "assistant\n", "assistant\n"]
