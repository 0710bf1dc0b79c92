"""Tests of /v1/messages with the unmodified anthropic package against a frontend."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.services.frontend.running import Running
from tests.services.frontend.scripted_replies import Said, prompt_text
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, prompt_of
from tests.services.frontend.tool_model import CALL, CALLS, WEATHER, tool_model_folder, tool_server

TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Tell the weather.",
        "input_schema": WEATHER["function"]["parameters"],
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
ASK: Any = [{"role": "user", "content": "How is the weather?"}]
THOUGHT = f"<think>\nMalmö.\n</think>\n\n{CALLS}"


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


@asynccontextmanager
async def serving(
    folder: Path, said: Said, **settings: Any
) -> AsyncIterator[tuple[Running, anthropic.AsyncAnthropic, ScriptedScheduler]]:
    key = settings.get("api_key") or "none"
    async with (
        tool_server(folder, said, **settings) as (frontend, _, script),
        anthropic.AsyncAnthropic(base_url=frontend.url, api_key=key, max_retries=0) as client,
    ):
        yield frontend, client, script


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "talking", "max_tokens": 500, "messages": ASK, **more}


async def test_text_whole_and_streamed(tool_model: Path) -> None:
    async with serving(tool_model, "It is sunny.") as (frontend, client, script):
        script.num_cached_tokens = 3
        frontend.write_each_token(script)
        reply = await client.messages.create(**asked(system="Be brief."))
        async with client.messages.stream(**asked(system="Be brief.")) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", "talking")
    assert [(block.type, block.text) for block in reply.content] == [("text", "It is sunny.")]
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.usage.cache_read_input_tokens == 3
    assert reply.usage.input_tokens + 3 == script.submissions[0].num_prompt_tokens
    assert "".join(texts) == "It is sunny."
    assert len(texts) > 1
    assert [block.text for block in streamed.content] == ["It is sunny."]
    assert (streamed.stop_reason, streamed.usage) == (reply.stop_reason, reply.usage)
    assert prompt_text(tool_model, prompt_of(script.submissions[0])).startswith("<|im_start|>system\nBe brief.")


async def test_thinking_text_and_tools_in_order(tool_model: Path) -> None:
    async with serving(tool_model, THOUGHT) as (frontend, client, script):
        frontend.write_each_token(script)
        reply = await client.messages.create(**asked(tools=TOOLS))
        async with client.messages.stream(**asked(tools=TOOLS)) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        script.tokens_per_step = 9
        async with client.messages.stream(**asked(tools=TOOLS)) as stream:
            wide = await stream.get_final_message()
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, weather, clock = reply.content
    assert (thinking.thinking, text.text) == ("Malmö.", "Let me see.")
    assert (weather.name, weather.input, clock.name, clock.input) == ("get_weather", {"city": "Malmö 🙂"}, "now", {})
    assert thinking.signature
    assert weather.id != clock.id
    assert reply.stop_reason == "tool_use"
    for message in (streamed, wide):
        assert [b.model_dump(exclude={"id"}) for b in message.content] == [
            b.model_dump(exclude={"id"}) for b in reply.content
        ]
        assert (message.stop_reason, message.usage) == (reply.stop_reason, reply.usage)
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert kinds.count("input_json") > 3


USAGE = {"cache_creation", "inference_geo", "output_tokens_details", "server_tool_use", "service_tier"}
DELTA_USAGE = {
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "input_tokens",
    "output_tokens",
    "output_tokens_details",
    "server_tool_use",
}


async def test_messages_have_every_field_that_their_specification_requires(tool_model: Path) -> None:
    async with serving(tool_model, THOUGHT) as (frontend, client, _script):
        reply = (await frontend.http.post("/v1/messages", json=asked(tools=TOOLS))).json()
        stream = (await frontend.http.post("/v1/messages", json=asked(tools=TOOLS, stream=True))).text
        turns = [*ASK, {"role": "assistant", "content": reply["content"]}, *ASK]
        answered = await client.messages.create(**asked(messages=turns, tools=TOOLS))
    thinking, text, weather, clock = reply["content"]
    assert (text["citations"], weather["caller"], clock["caller"]) == (None, {"type": "direct"}, {"type": "direct"})
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    opening, end = events[0]["message"], next(event for event in events if event["type"] == "message_delta")
    for message in (reply, opening):
        assert (message["container"], message["stop_details"]) == (None, None)
        assert message["usage"].keys() >= USAGE
        assert (message["usage"]["service_tier"], message["usage"]["server_tool_use"]) == ("standard", None)
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None, "container": None}
    assert end["usage"].keys() == DELTA_USAGE
    thought = reply["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 3 < thought == end["usage"]["output_tokens_details"]["thinking_tokens"] < reply["usage"]["output_tokens"]
    assert opening["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block.keys() for block in blocks] == [block.keys() for block in (thinking, text, weather, clock)]
    assert answered.type == "message"


async def test_tool_results_are_rendered_by_the_template(tool_model: Path) -> None:
    turns = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "now", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "12:00"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no such", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    async with serving(tool_model, "ok") as (_, client, script):
        await client.messages.create(**asked(messages=turns, tools=TOOLS, system=[{"type": "text", "text": "S"}]))
        counted = await client.messages.count_tokens(
            model="talking", messages=turns, tools=TOOLS, system=[{"type": "text", "text": "S"}]
        )
    prompt = prompt_text(tool_model, prompt_of(script.submissions[0]))
    assert prompt.endswith(
        '<|im_start|>assistant\nLet me see.<tool_call>{"name": "now", "arguments": {"x": 1}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n12:00<|im_end|>\n<|im_start|>tool\nError: no such<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert json.dumps(TOOLS[1]["input_schema"]) in prompt
    assert counted.input_tokens == script.submissions[0].num_prompt_tokens


async def test_a_last_assistant_message_is_continued(tool_model: Path) -> None:
    turns = [*ASK, {"role": "assistant", "content": "It is"}]
    async with serving(tool_model, " sunny.") as (_, client, script):
        reply = await client.messages.create(**asked(messages=turns))
    assert reply.content[0].text == " sunny."
    assert prompt_text(tool_model, prompt_of(script.submissions[0])).endswith("<|im_start|>assistant\nIt is")


async def test_stop_reasons(tool_model: Path) -> None:
    async with serving(tool_model, CALL) as (_, client, _script):
        short = await client.messages.create(**asked(tools=TOOLS, max_tokens=40))
        stopped = await client.messages.create(**asked(stop_sequences=["weather"]))
        async with client.messages.stream(**asked(stop_sequences=["weather"])) as stream:
            streamed = await stream.get_final_message()
        far = await client.messages.create(**asked(max_tokens=20_000))  # the context has 4,096
    assert short.stop_reason == "max_tokens"
    assert "Malmö 🙂".startswith(short.content[0].input["city"])  # the part that arrived
    for message in (stopped, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "weather")
        assert message.content[0].text == '\n{"name": "get_'
    assert far.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("choice", "shown", "enforced"),
    [
        ({"type": "auto"}, True, ""),
        ({"type": "none"}, False, ""),
        ({"type": "any"}, True, "star"),
        ({"type": "any", "disable_parallel_tool_use": True}, True, "now"),
        ({"type": "tool", "name": "now"}, True, "now"),
    ],
)
async def test_tool_choice(tool_model: Path, choice: Any, shown: bool, enforced: str) -> None:
    async with serving(tool_model, CALL) as (_, client, script):
        await client.messages.create(**asked(tools=TOOLS, tool_choice=choice))
    assert ("get_weather" in prompt_text(tool_model, prompt_of(script.submissions[0]))) == shown
    constraint = script.submissions[0].sampling.structured_output.structural_tag
    assert bool(constraint) == bool(enforced)
    assert enforced in constraint


async def test_thinking_reaches_template_and_budget(tool_model: Path) -> None:
    kinds: list[Any] = [
        {"type": "enabled", "budget_tokens": 2000},
        {"type": "disabled"},
        {"type": "adaptive", "display": "omitted"},
    ]
    async with serving(tool_model, "Hm.</think>Yes.") as (_, client, script):
        replies = [await client.messages.create(**asked(thinking=kind)) for kind in kinds]
    open_ends = [prompt_text(tool_model, prompt_of(s)).endswith("<think>\n") for s in script.submissions]
    assert open_ends == [True, False, True]
    assert [s.sampling.thinking_token_budget for s in script.submissions] == [2000, 0, 0]
    assert [[block.type for block in reply.content] for reply in replies] == [["thinking", "text"], ["text"], ["text"]]


async def test_the_output_format(tool_model: Path) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}
    async with serving(tool_model, "</think>{}") as (_, client, script):
        reply = await client.messages.create(**asked(output_config=form))
    assert reply.content[0].text == "{}"
    assert '"json_schema": {"type": "object"}' in script.submissions[0].sampling.structured_output.structural_tag


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"extra_body": {"temperature": 3}}, "temperature must be in [0, 2], got 3.0."),
        ({"messages": []}, "messages must contain at least one message"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "blocks of type 'image' are not supported"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools of type 'computer_20250124'"),
        (
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice: 'web_search' is run by Anthropic's servers",
        ),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0]: name must be a text"),
        ({"tool_choice": {"type": "any"}}, "when it is used, tools must be set"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type must be one of auto, any, tool, none, got 'maybe'"),
        ({"tool_choice": {"type": {}}}, "tool_choice.type must be one of auto, any, tool, none, got {}"),
        ({"tool_choice": {"type": []}}, "tool_choice.type must be one of auto, any, tool, none, got []"),
        ({"extra_body": {"temprature": 1}}, "temprature; did you mean 'temperature'"),
        ({"extra_body": {"mcp_servers": [1]}}, "mcp_servers is not supported by this server"),
    ],
)
async def test_refusals(tool_model: Path, more: dict[str, Any], text: str) -> None:
    async with serving(tool_model, "x") as (_, client, _script):
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**asked(**more))
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert text in body["error"]["message"]


async def test_errors_have_the_classes_of_anthropics_client(tool_model: Path) -> None:
    async with serving(tool_model, "x", api_key="secret", max_request_bytes=2000) as (frontend, client, script):
        assert (await client.messages.create(**asked())).content[0].text == "x"
        with pytest.raises(anthropic.AuthenticationError, match="unknown API key"):
            await client.with_options(api_key="wrong").messages.create(**asked())
        with pytest.raises(anthropic.NotFoundError, match="The model `other` does not exist"):
            await client.messages.create(**asked(model="other"))
        with pytest.raises(anthropic.APIStatusError) as large:
            await client.messages.create(**asked(system="s" * 3000))
        assert (large.value.status_code, large.value.body["error"]["type"]) == (413, "request_too_large")
        broken = await frontend.http.post("/v1/messages", content=b"{", headers={"x-api-key": "secret"})
        assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
        script.pause()
        with pytest.raises(anthropic.APIStatusError) as late:
            await client.messages.create(**asked(), extra_headers={"x-request-timeout": "0.2"})
        assert (late.value.status_code, late.value.body["error"]["type"]) == (504, "timeout_error")


async def test_an_interrupted_stream_ends_with_an_error(tool_model: Path) -> None:
    async with serving(tool_model, "one two three four", unavailable_after_s=0.2) as (frontend, client, script):
        script.step_s = 0.2
        frontend.write_each_token(script)

        async def read() -> None:
            async with client.messages.stream(**asked()) as stream:
                async for event in stream:
                    if event.type == "text":
                        script.pause()
                        script.reject_hello = "gone"
                        script.break_sessions()

        with pytest.raises(anthropic.APIStatusError) as broken:
            await read()
        assert broken.value.body["error"]["type"] in ("overloaded_error", "api_error", "invalid_request_error")


async def test_a_tool_runner_continues_without_a_thread(tool_model: Path) -> None:
    """Checks that Anthropic's runner keeps the conversation itself after the server's specific error code."""
    called: list[str] = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Returns the weather of a city."""
        called.append(city)
        return "Rain."

    def reply_to(prompt: str) -> str:
        return "It rains." if "Rain." in prompt else CALL

    async with serving(tool_model, reply_to) as (_, client, _):
        runner = client.beta.messages.tool_runner(**asked(tools=[get_weather], max_iterations=4))
        replies = [reply async for reply in runner]
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.beta.messages.create(**asked(thread={"type": "create"}))
        await client.beta.messages.create(**asked(thread=None))
    assert called == ["Malmö 🙂"]
    assert [reply.stop_reason for reply in replies] == ["tool_use", "end_turn"]
    assert replies[-1].content[0].text == "It rains."
    body: Any = refused.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}


async def test_answers_and_errors_have_the_request_id_header_of_anthropic(tool_model: Path) -> None:
    async with serving(tool_model, "Yes.") as (_, client, _):
        mine = {"x-request-id": "mine"}
        reply = await client.messages.create(**asked(), extra_headers=mine)
        async with client.messages.stream(**asked(), extra_headers=mine) as stream:
            assert stream.request_id == "mine"
        drawn = await client.messages.create(**asked())
        for wrong in ({"max_tokens": 0}, {"messages": "x"}, {"model": "nobody"}):
            with pytest.raises(anthropic.APIStatusError) as refused:
                await client.messages.create(**asked(**wrong), extra_headers=mine)
            assert refused.value.request_id == "mine", wrong
    assert reply._request_id == "mine"
    assert drawn._request_id


async def test_stop_sequences_count_in_the_text_only(tool_model: Path) -> None:
    """Checks vllm#52393: a client's stop string in the thinking, or in a call's markup, ended the answer."""
    stops = {"stop_sequences": ["Malmö", '"']}
    async with serving(tool_model, THOUGHT) as (_, client, _script):
        reply = await client.messages.create(**asked(tools=TOOLS, **stops))
    assert (reply.stop_reason, reply.stop_sequence) == ("tool_use", None)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    async with serving(tool_model, "<think>It is</think>Hot: it is") as (_, client, _script):
        reply = await client.messages.create(**asked(stop_sequences=["it is", "It is"]))
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "it is")
    assert reply.content[-1].text == "Hot: "


async def test_tokens_of_a_call_can_be_counted(tool_model: Path) -> None:
    """Checks a complete request, as gateways send it before the actual call."""
    whole = asked(temperature=0.5, top_p=0.9, stream=True, stop_sequences=["x"])
    async with serving(tool_model, lambda _: "hi") as (frontend, _, _):
        counted = await frontend.http.post("/v1/messages/count_tokens", json=whole)
        bare = await frontend.http.post("/v1/messages/count_tokens", json={"model": "talking", "messages": ASK})
        wrong = await frontend.http.post("/v1/messages/count_tokens", json={**whole, "temprature": 1})
    assert counted.json() == bare.json()
    assert wrong.status_code == 400
    assert "did you mean 'temperature'?" in wrong.json()["error"]["message"]
