"""/api with the unmodified ollama package, against a frontend."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.running import Running
from tests.services.frontend.scripted_replies import Said, prompt_text
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, prompt_of
from tests.services.frontend.tool_model import ASK, CALLS, CLOCK, WEATHER, tool_model_folder, tool_server

THOUGHT = f"<think>\nMalmö.\n</think>\n\n{CALLS}"


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


@asynccontextmanager
async def serving(folder: Path, said: Said, **settings: Any) -> AsyncIterator[tuple[Running, Any, ScriptedScheduler]]:
    ollama = pytest.importorskip("ollama")
    key = settings.get("api_key") or "none"
    async with tool_server(folder, said, **settings) as (frontend, _, script):
        client = ollama.AsyncClient(host=frontend.url, headers={"Authorization": f"Bearer {key}"})
        try:
            yield frontend, client, script
        finally:
            await client._client.aclose()


async def test_a_chat_whole_and_streamed(tool_model: Path) -> None:
    async with serving(tool_model, "It is sunny.") as (frontend, client, script):
        frontend.write_each_token(script)
        whole = await client.chat("talking:latest", ASK)
        pieces = [piece async for piece in await client.chat("talking", ASK, stream=True)]
    assert (whole.model, whole.message.role, whole.message.content) == ("talking", "assistant", "It is sunny.")
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.prompt_eval_count == script.submissions[0].num_prompt_tokens
    assert whole.total_duration > whole.eval_duration >= 0
    assert "".join(piece.message.content for piece in pieces) == "It is sunny."
    assert len(pieces) > 1
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (pieces[-1].done_reason, pieces[-1].eval_count) == ("stop", whole.eval_count)
    assert prompt_text(tool_model, prompt_of(script.submissions[0])).startswith("<|im_start|>user\nHow is the")


async def test_reasoning_and_calls_are_separate_and_calls_complete(tool_model: Path) -> None:
    async with serving(tool_model, THOUGHT) as (_, client, _script):
        whole = await client.chat("talking", ASK, tools=[WEATHER, CLOCK], think=True)
        pieces = [p async for p in await client.chat("talking", ASK, tools=[WEATHER, CLOCK], think=True, stream=True)]
        silent = await client.chat("talking", ASK, tools=[WEATHER, CLOCK], think=False)
    calls = [(call.function.name, dict(call.function.arguments)) for call in whole.message.tool_calls]
    assert calls == [("get_weather", {"city": "Malmö 🙂"}), ("now", {})]
    assert (whole.message.thinking, whole.message.content) == ("Malmö.", "Let me see.")
    streamed = [call for piece in pieces for call in piece.message.tool_calls or ()]
    assert [(call.function.name, dict(call.function.arguments)) for call in streamed] == calls
    assert "".join(piece.message.thinking or "" for piece in pieces) == "Malmö."
    assert not silent.message.thinking


async def test_results_of_tools_go_through_the_template(tool_model: Path) -> None:
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {"x": 1}}}]},
        {"role": "tool", "tool_name": "now", "content": "12:00"},
    ]
    async with serving(tool_model, "ok") as (_, client, script):
        await client.chat("talking", turns, tools=[CLOCK])
    assert prompt_text(tool_model, prompt_of(script.submissions[0])).endswith(
        '<tool_call>{"name": "now", "arguments": {"x": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n12:00<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_generate_with_a_template_and_raw(tool_model: Path) -> None:
    async with serving(tool_model, "one two") as (_, client, script):
        told = await client.generate("talking", "Count.", system="Be brief.", options={"num_predict": 2})
        raw = [piece async for piece in await client.generate("talking", "Count.", raw=True, stream=True)]
        loaded = await client.generate("talking", "")
    assert (told.done_reason, told.eval_count) == ("length", 2)
    assert "".join(piece.response for piece in raw) == "one two"
    assert (loaded.response, loaded.done_reason) == ("", "load")
    first, second = (prompt_text(tool_model, prompt_of(one)) for one in script.submissions)
    assert first.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCount.")
    assert second == "Count."


async def test_options_reach_the_sampler_and_log_probabilities_come_back(tool_model: Path) -> None:
    options = {"temperature": 0.5, "top_k": 3, "repeat_penalty": 1.5, "seed": 7, "num_ctx": 99, "num_predict": -1}
    async with serving(tool_model, "yes") as (_, client, script):
        told = await client.chat("talking", ASK, options=options, logprobs=True, top_logprobs=2, keep_alive="5m")
    sent = script.submissions[0].sampling
    assert (sent.temperature, sent.top_k, sent.repetition_penalty) == pytest.approx((0.5, 3, 1.5))
    assert [entry.token for entry in told.logprobs]
    assert len(told.logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ({"options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        ({"options": {"tempreature": 1}}, 400, "options.tempreature; did you mean 'options.temperature'?"),
        ({"options": {"repeat_penalty": 0}}, 400, "repeat_penalty must be greater than zero"),
        ({"options": {"num_predict": 0}}, 400, "num_predict must be at least 1"),
        ({"format": "xml"}, 400, "format"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "images are not supported"),
        ({"messages": [{"role": "nobody"}]}, 400, "role must be one of"),
        ({"model": "other"}, 404, "`other` does not exist"),
        ({"modle": "x"}, 400, "modle; did you mean 'model'?"),
    ],
)
async def test_refusals_have_ollamas_format(tool_model: Path, more: dict[str, Any], status: int, said: str) -> None:
    async with tool_server(tool_model, "no") as (frontend, _, _script):
        reply = await frontend.http.post("/api/chat", json={"model": "talking", "messages": ASK, **more})
    assert (reply.status_code, list(reply.json())) == (status, ["error"])
    assert said in reply.json()["error"]


async def test_keys_are_asked_for_on_every_path(tool_model: Path) -> None:
    async with tool_server(tool_model, "no", api_key="secret") as (frontend, _, _script):
        for path in ("chat", "generate", "embed", "embeddings", "show"):
            reply = await frontend.http.post(f"/api/{path}", json={"model": "talking"})
            assert (reply.status_code, list(reply.json())) == (401, ["error"])
        for path in ("tags", "ps", "version"):
            assert (await frontend.http.get(f"/api/{path}")).status_code == 401
        shown = {"authorization": "Bearer secret"}
        assert (await frontend.http.get("/api/tags", headers=shown)).json()["models"][0]["model"] == "talking"


async def test_streams_are_lines_unless_one_answer_is_asked_for(tool_model: Path) -> None:
    async with tool_server(tool_model, "no one") as (frontend, _, _script):
        body = {"model": "talking", "messages": ASK, "options": {"num_predict": 1}}
        reply = await frontend.http.post("/api/chat", json=body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert lines[-1]["done"]
    assert lines[-1]["done_reason"] == "length"


async def test_models_are_listed_and_shown(tool_model: Path) -> None:
    async with serving(tool_model, "no") as (_, client, _script):
        listed, shown, loaded = await client.list(), await client.show("talking"), await client.ps()
    assert [model.model for model in listed.models] == ["talking"]
    assert [model.model for model in loaded.models] == ["talking"]
    assert set(shown.capabilities) >= {"completion", "tools", "thinking"}
    assert "im_start" in shown.template


async def test_no_input_has_no_vector(tool_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tool_model, "no") as (_, client, _script):
        told = await client.embed("talking", [])
    assert told.embeddings == []
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_vectors(tool_model: Path) -> None:
    async with serving(tool_model, "no") as (_, client, script):
        told = await client.embed("talking", ["a b", "c"])
        older = await client.embeddings("talking", "a b")
    assert [len(vector) for vector in told.embeddings] == [2, 2]
    assert list(older.embedding) == list(told.embeddings[0])
    assert told.prompt_eval_count == sum(one.num_prompt_tokens for one in script.submissions[:2])


async def test_an_error_after_the_first_line_is_the_last_line(tool_model: Path) -> None:
    async with tool_server(tool_model, "a b c d e f g h i j k l m n o p") as (frontend, _, script):
        script.step_s = 0.2  # at least 17 tokens
        body = {"model": "talking", "messages": ASK}
        reply = await frontend.http.post("/api/chat", json=body, headers={"x-request-timeout": "3"})
    first, *_, last = [json.loads(line) for line in reply.text.splitlines()]
    assert (reply.status_code, first["done"], list(last)) == (200, False, ["error"])


async def test_curl_needs_no_content_type_and_pages_in_browsers_do(tool_model: Path) -> None:
    """`curl URL -d BODY`, as in Ollama's documentation, sends a form's content type."""
    body = json.dumps({"model": "talking", "prompt": "How is the weather?", "stream": False})
    form = {"content-type": "application/x-www-form-urlencoded"}
    async with serving(tool_model, "It is sunny.") as (frontend, _, _script):
        answer = await frontend.http.post("/api/generate", content=body, headers=form)
        shown = await frontend.http.post("/api/show", content='{"model": "talking"}', headers=form)
        page = {**form, "origin": frontend.url}
        refused = await frontend.http.post("/api/generate", content=body, headers=page)
        elsewhere = {**form, "origin": "https://elsewhere.example"}
        other = await frontend.http.post("/api/generate", content=body, headers=elsewhere)
    assert (answer.status_code, answer.json()["response"]) == (200, "It is sunny.")
    assert shown.status_code == 200
    assert (refused.status_code, other.status_code) == (400, 403)
    assert "content-type" in refused.json()["error"]


async def test_stop_strings_count_in_the_content_only(tool_model: Path) -> None:
    asked = {"tools": [WEATHER, CLOCK], "think": True, "options": {"stop": ["Malmö", '"']}}
    async with serving(tool_model, THOUGHT) as (_, client, _script):
        whole = await client.chat("talking", ASK, **asked)
        pieces = [piece async for piece in await client.chat("talking", ASK, **asked, stream=True)]
    assert (whole.message.thinking, whole.message.content, len(whole.message.tool_calls)) == (
        "Malmö.",
        "Let me see.",
        2,
    )
    assert "".join(piece.message.thinking or "" for piece in pieces) == "Malmö."


@pytest.mark.parametrize(
    ("path", "body", "field", "told"),
    [
        # ollama#8395: a conversation to /api/generate got an empty answer, as a call that loads the model does
        ("/api/generate", {"messages": ASK}, "messages", "prompt must not be empty; messages is a field of /api/chat"),
        ("/api/chat", {"prompt": "hi"}, "prompt", "messages must not be empty; prompt is a field of /api/generate"),
        ("/api/chat", {"messages": [], "prompt": "hi"}, "prompt", "must not be empty"),
    ],
)
async def test_a_call_to_the_wrong_path_names_the_right_one(
    tool_model: Path, path: str, body: dict[str, Any], field: str, told: str
) -> None:
    async with tool_server(tool_model, "ok") as (frontend, _, script):
        answer = await frontend.http.post(path, json={"model": "talking", **body})
        loads = [
            await frontend.http.post(path, json={"model": "talking", **empty})
            for empty in ({}, {"prompt": "", "messages": []}, {"keep_alive": 0})
        ]
    assert answer.status_code == 400
    assert field in answer.json()["error"]
    assert told in answer.json()["error"]
    assert [load.json()["done_reason"] for load in loads] == ["load"] * 3
    assert not script.submissions


@pytest.mark.parametrize(
    "options",
    [
        # n8n-docs#2066: the options of a workflow's node, at the values that its form shows
        {
            "frequency_penalty": 0, "low_vram": False, "main_gpu": 0, "num_batch": 512, "num_ctx": 2048, "num_gpu": -1,
            "num_predict": -1, "num_thread": 0, "penalize_newline": True, "presence_penalty": 0, "repeat_penalty": 1,
            "temperature": 0.7, "top_k": -1, "top_p": 1, "use_mlock": False, "use_mmap": True, "vocab_only": False,
        },
        {"penalize_newline": None, "repeat_last_n": -1},
        {"penalize_newline": True, "repeat_penalty": 1.2},  # every token is penalized here
        {"repeat_last_n": 64},  # Ollama's default for unset penalties
        {"repeat_last_n": 33, "repeat_penalty": 1.0, "presence_penalty": 0.0},
    ],
)  # fmt: skip
async def test_options_that_change_nothing_are_taken(tool_model: Path, options: dict[str, Any]) -> None:
    body = {"model": "talking", "messages": ASK, "stream": False, "options": options}
    async with tool_server(tool_model, "ok") as (frontend, _, _script):
        taken = await frontend.http.post("/api/chat", json=body)
        other = await frontend.http.post("/api/chat", json={**body, "options": {"penalize_newline": False}})
    assert taken.status_code == 200, taken.text
    assert (other.status_code, "penalize_newline" in other.json()["error"]) == (400, True)


async def test_the_window_of_penalties_that_act_is_refused(tool_model: Path) -> None:
    async with tool_server(tool_model, "ok") as (frontend, _, _script):
        body = {"model": "talking", "messages": ASK, "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}
        answer = await frontend.http.post("/api/chat", json=body)
        plain = await frontend.http.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1, "repeat_last_n": 64, "repetition_penalty": 1.0}
        )
        acting = await frontend.http.post(
            "/v1/completions", json={"prompt": "x", "repeat_last_n": 64, "presence_penalty": 1}
        )
    assert (answer.status_code, "repeat_last_n" in answer.json()["error"]) == (400, True)
    assert (plain.status_code, acting.status_code) == (200, 400)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"x": 1}, ""), ('{"x": 1}', ""), ("", ""), (["x"], "arguments of the tool call 'f' must be an object, got list")],
)
async def test_arguments_of_calls_may_be_text(tool_model: Path, arguments: object, error: str) -> None:
    """As in histories written by OpenAI's clients (open-webui#16235)."""
    call = {"function": {"name": "f", "arguments": arguments}}
    said = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    async with tool_server(tool_model, "ok") as (frontend, _, _script):
        answer = await frontend.http.post("/api/chat", json={"messages": said, "stream": False})
    assert answer.status_code == (400 if error else 200), answer.text
    assert error in answer.text
