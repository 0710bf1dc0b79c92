"""Tests of /v1/responses with the unmodified openai package against a frontend."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.services.frontend.openai_edge.responses.store import ResponseStore, StoredResponse
from quire.shared.errors import NotFound
from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import CALL, CALLS, CLOCK, WEATHER, tool_model_folder, tool_server

TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
THOUGHT = f"<think>\nMalmö.\n</think>\n\n{CALLS}"


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "talking", "input": "How is the weather?", **more}


def without_ids(output: Any) -> list[Any]:
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in output]


async def test_text_whole_and_streamed(tool_model: Path) -> None:
    async with tool_server(tool_model, "It is sunny.") as (_, client, script):
        script.num_cached_tokens = 2
        reply = await client.responses.create(**asked(instructions="Be brief.", metadata={"a": "b"}, temperature=0.5))
        events = [event async for event in await client.responses.create(**asked(stream=True))]
    assert reply.output_text == "It is sunny."
    assert (reply.status, reply.metadata, reply.temperature) == ("completed", {"a": "b"}, 0.5)
    assert reply.usage.input_tokens == script.submissions[0].num_prompt_tokens
    assert reply.usage.input_tokens_details.cached_tokens == 2
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert prompt_text(tool_model, prompt_of(script.submissions[0])).startswith("<|im_start|>system\nBe brief.")
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "It is sunny."
    assert without_ids(events[-1].response.output) == without_ids(reply.output)


REPEATED = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "max_tool_calls": 3,
    "safety_identifier": "user-1",
    "prompt_cache_key": "chat-1",
}


async def test_a_response_repeats_the_request(tool_model: Path) -> None:
    """Checks that each field that Open Responses requires is present from the first event on."""
    async with tool_server(tool_model, "It is sunny.") as (frontend, client, script):
        plain = (await frontend.http.post("/v1/responses", json=asked())).json()
        reply = (await frontend.http.post("/v1/responses", json=asked(**REPEATED, service_tier="flex"))).json()
        cut = (await frontend.http.post("/v1/responses", json=asked(max_output_tokens=1))).json()
        odd = (await frontend.http.post("/v1/responses", json=asked(prompt_cache_key=5, user="u"))).json()
        events = [event async for event in await client.responses.create(**asked(stream=True, extra_body=REPEATED))]
    nothing = {"presence_penalty": 0, "frequency_penalty": 0, "max_tool_calls": None}
    unset = {**nothing, "safety_identifier": None, "prompt_cache_key": None}
    for response, expected in ((plain, unset), (reply, REPEATED), (cut, unset), (odd, unset)):
        assert {name: response[name] for name in expected} == expected
        assert response["service_tier"] == "default"
    assert (script.submissions[1].sampling.presence_penalty, script.submissions[1].sampling.frequency_penalty) == (
        0.5,
        -0.25,
    )
    assert plain["completed_at"] >= plain["created_at"]
    assert (cut["status"], cut["completed_at"]) == ("incomplete", None)
    first, second, last = (event.response.to_dict() for event in (*events[:2], events[-1]))
    for response in (first, second):
        assert response.keys() == last.keys()
        assert response["completed_at"] is None
        assert {name: response[name] for name in REPEATED} == REPEATED
    assert last["completed_at"] >= last["created_at"]


async def test_repeated_functions_have_all_of_their_fields(tool_model: Path) -> None:
    tools = [
        {"type": "function", "name": "a", "parameters": {"type": "object"}},
        {"type": "function", "name": "b", "description": "B.", "strict": True},
        {"type": "function", "name": "c", "strict": None},
        {"type": "web_search"},
    ]
    async with tool_server(tool_model, "ok") as (frontend, _client, _script):
        reply = (await frontend.http.post("/v1/responses", json=asked(tools=tools))).json()
    bare = {"type": "function", "description": None, "parameters": None, "strict": False}
    assert reply["tools"] == [
        {**bare, "name": "a", "parameters": {"type": "object"}},
        {**bare, "name": "b", "description": "B.", "strict": True},
        {**bare, "name": "c"},
        {"type": "web_search"},
    ]


async def test_compaction_is_not_found(tool_model: Path) -> None:
    async with tool_server(tool_model, "ok") as (frontend, _client, _script):
        replies = [
            await frontend.http.post("/v1/responses/compact", json=body) for body in (asked(), {}, {"input": []})
        ]
        got = await frontend.http.get("/v1/responses/compact")
    assert [reply.status_code for reply in (*replies, got)] == [404] * 4
    assert "not supported" in replies[0].json()["error"]["message"]
    assert "'compact' not found" in got.json()["error"]["message"]


async def test_reasoning_text_and_calls_in_order(tool_model: Path) -> None:
    async with tool_server(tool_model, THOUGHT) as (_, client, script):
        reply = await client.responses.create(**asked(tools=TOOLS))
        events = [event async for event in await client.responses.create(**asked(tools=TOOLS, stream=True))]
        script.tokens_per_step = 9
        wide = [event async for event in await client.responses.create(**asked(tools=TOOLS, stream=True))]
    thought, message, weather, clock = reply.output
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    assert thought.content[0].text == "Malmö."
    assert message.content[0].text == "Let me see."
    assert (weather.name, json.loads(weather.arguments)) == ("get_weather", {"city": "Malmö 🙂"})
    assert (clock.name, clock.arguments) == ("now", "{}")
    assert weather.call_id != clock.call_id
    assert 3 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens
    for streamed in (events, wide):
        last = streamed[-1].response
        assert without_ids(last.output) == without_ids(reply.output)
        assert last.usage == reply.usage
        done = [event.item for event in streamed if event.type == "response.output_item.done"]
        assert [item.id for item in done] == [item.id for item in last.output]
        for index, item in enumerate(last.output[2:], start=2):
            deltas = [e.delta for e in streamed if e.type.endswith("arguments.delta") and e.output_index == index]
            assert "".join(deltas) == item.arguments


async def test_conversations_go_on_by_id_or_by_items(tool_model: Path) -> None:
    async with tool_server(tool_model, lambda prompt: CALL if "12:00" not in prompt else "Noon.") as (
        _,
        client,
        script,
    ):
        first = await client.responses.create(**asked(tools=TOOLS, instructions="A."))
        call = next(item for item in first.output if item.type == "function_call")
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}]
        by_id = await client.responses.create(
            **asked(input=result, tools=TOOLS, previous_response_id=first.id, instructions="B.")
        )
        items = [{"role": "user", "content": "How is the weather?"}, *[i.to_dict() for i in first.output], *result]
        by_items = await client.responses.create(**asked(input=items, tools=TOOLS, instructions="B.", store=False))
        found = await client.responses.retrieve(by_id.id)
        inputs = await client.responses.input_items.list(by_id.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.retrieve(by_items.id)
        await client.responses.delete(by_id.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.create(**asked(previous_response_id=by_id.id))
        with pytest.raises(openai.BadRequestError, match="in the background"):
            await client.responses.cancel(first.id)
    assert by_id.output_text == by_items.output_text == "Noon."
    assert found.output_text == "Noon."
    assert inputs.data[0].output == "12:00"
    prompts = [prompt_text(tool_model, prompt_of(s)) for s in script.submissions]
    assert prompts[1] == prompts[2]
    assert "B." in prompts[1]
    assert "A." not in prompts[1]
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Malmö 🙂"}}</tool_call><|im_end|>' in prompts[1]


async def test_responses_are_not_stored_without_a_store_size(tool_model: Path) -> None:
    async with tool_server(tool_model, "x", response_store_mb=0) as (_, client, _script):
        reply = await client.responses.create(**asked())
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(reply.id)
        with pytest.raises(openai.BadRequestError, match="stores no responses"):
            await client.responses.create(**asked(previous_response_id=reply.id))


async def test_integers_of_any_size_are_echoed(tool_model: Path) -> None:
    """Checks echoed and stored fields: JSON does not bound integers, while our serializer does."""
    limits = {"minimum": -(10**400), "maximum": 2**64, "default": 2**64 - 1}
    parameters = {"type": "object", "properties": {"n": {"type": "integer", **limits}}}
    tools = [{"type": "function", "name": "count", "parameters": parameters}]
    items: Any = [
        {"type": "message", "role": "user", "content": "Count.", "status": "completed", "id": "m", "n": 10**30}
    ]
    async with tool_server(tool_model, "One.") as (_, client, _script):
        reply = await client.responses.create(**asked(tools=tools))
        (found,) = reply.tools
        counted = await client.responses.create(**asked(input=items))
        items = await client.responses.input_items.list(counted.id)
        again = await client.responses.create(**asked(previous_response_id=reply.id))
    assert (again.output_text, items.data[0].n) == ("One.", 1e30)  # type: ignore[union-attr]
    of_n: Any = found.parameters["properties"]["n"]  # type: ignore[index]
    assert (of_n["minimum"], of_n["maximum"], of_n["default"]) == (-sys.float_info.max, 2.0**64, 2**64 - 1)


def test_the_least_recently_used_response_is_evicted() -> None:
    def stored(name: str) -> StoredResponse:
        return StoredResponse("t", {"id": name}, [], [{"type": "message", "content": "x" * 100}])

    store = ResponseStore(3 * stored("a").num_bytes)
    for name in ("a", "b", "c"):
        store.put(stored(name))
    store.get("a", "t")
    store.put(stored("d"))
    with pytest.raises(NotFound):
        store.get("b", "t")
    assert [store.get(name, "t").body["id"] for name in ("a", "c", "d")] == ["a", "c", "d"]
    store.delete("a", "t")
    store.put(stored("e"))
    assert store.get("c", "t").body["id"] == "c"
    store.put(StoredResponse("t", {"id": "large"}, [], [{"content": "x" * 1000}]))
    with pytest.raises(NotFound):
        store.get("large", "t")


def test_a_response_replaces_only_responses_of_the_same_tenant() -> None:
    """Checks this since clients choose the ids of background responses."""

    def stored(tenant: str, text: str) -> StoredResponse:
        return StoredResponse(tenant, {"id": "resp_x", "text": text}, [], [])

    store = ResponseStore(2 * stored("t", "1").num_bytes)
    store.put(stored("u", "0"))
    for number in range(9):
        store.put(stored("t", str(number)))
    assert [store.get("resp_x", tenant).body["text"] for tenant in ("t", "u")] == ["8", "0"]
    store.delete("resp_x", "t")
    assert store.find("resp_x", "t") is None
    assert store.find("resp_x", "u") is not None
    store.put(StoredResponse("u", {"id": "resp_x", "text": "x" * 1000}, [], []))
    assert store.find("resp_x", "u") is None, "one that is too large takes the place of the old one, and is not kept"


async def test_what_is_cut_off_is_incomplete(tool_model: Path) -> None:
    async with tool_server(tool_model, "one two three four five six") as (_, client, _script):
        reply = await client.responses.create(**asked(max_output_tokens=3))
        events = [e async for e in await client.responses.create(**asked(max_output_tokens=3, stream=True))]
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].content == reply.output[0].content


async def test_forms_logprobs_and_effort(tool_model: Path) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}
    async with tool_server(tool_model, "</think>{}") as (_, client, script):
        reply = await client.responses.create(**asked(text=form, reasoning={"effort": "low"}, top_logprobs=2))
        whole = await client.responses.create(**asked(include=["message.output_text.logprobs"]))
        events = [e async for e in await client.responses.create(**asked(top_logprobs=2, stream=True))]
    assert prompt_text(tool_model, prompt_of(script.submissions[0])).endswith("<think>\n")
    assert '"json_schema": {"type": "object"}' in script.submissions[0].sampling.structured_output.structural_tag
    assert reply.output_text == "{}"
    assert len(reply.output[0].content[0].logprobs[0].top_logprobs) == 2
    assert len(whole.output[0].content[0].logprobs) == whole.usage.output_tokens
    logprobs = [p for e in events if e.type == "response.output_text.delta" for p in e.logprobs]
    assert [p.token for p in logprobs] == [p.token for p in events[-1].response.output[0].content[0].logprobs]


@pytest.mark.parametrize(
    ("choice", "enforced"),
    [("required", "star"), ({"type": "function", "name": "now"}, "now"), ("auto", ""), ("none", "")],
)
async def test_tool_choice(tool_model: Path, choice: Any, enforced: str) -> None:
    async with tool_server(tool_model, CALL) as (_, client, script):
        reply = await client.responses.create(**asked(tools=TOOLS, tool_choice=choice))
    constraint = script.submissions[0].sampling.structured_output.structural_tag
    assert bool(constraint) == bool(enforced)
    assert enforced in constraint
    assert reply.tool_choice == choice or reply.tool_choice.name == "now"
    assert ("get_weather" in prompt_text(tool_model, prompt_of(script.submissions[0]))) == (choice != "none")


async def test_turns_of_all_kinds(tool_model: Path) -> None:
    items: Any = [
        {"role": "system", "content": "A."},
        {"role": "developer", "content": [{"type": "input_text", "text": "B."}]},
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
        {"role": "user", "content": "ha"},
    ]
    async with tool_server(tool_model, "x") as (_, client, script):
        await client.responses.create(**asked(input=items, instructions="I."))
    assert prompt_text(tool_model, prompt_of(script.submissions[0])) == (
        "<|im_start|>system\nI.\n\nA.\n\nB.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\nha<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        ({"input": []}, 400, "input must contain at least one message"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "input[0]: role must be user, assistant, system"),
        ({"input": [{"role": "user", "content": 5}]}, 400, "input[0].content must be text or a list of parts"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "parts of type 'input_image'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "items of type 'item_reference'"),
        ({"tools": [{"type": ""}]}, 400, "tools[0]: type must be the kind of a tool"),
        ({"tools": [{"type": "namespace", "name": "fs"}]}, 400, "tools[0]: a namespace needs a name and a list"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            400,
            "tool_choice: tools of type 'web_search' are not supported",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "fly"}}, 400, "'fly' is not the name"),
        ({"tool_choice": "required"}, 400, "when it is used, tools must be set"),
        ({"background": True, "store": False}, 400, "background requires store=true"),
        ({"include": ["everything"]}, 400, "include: 'everything' is not supported"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type"),
        (  # llama.cpp's test_compat_oai_responses.py
            {"text": {"format": {"type": "json_schema", "name": "test"}}},
            400,
            "text.format of type json_schema needs schema",
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "extra_body": {"structured_outputs": {"regex": "a"}}},
            400,
            "text.format and structured_outputs both constrain the output",
        ),
        ({"extra_body": {"temprature": 1}}, 400, "Unrecognized request argument supplied: temprature"),
        ({"temperature": 3}, 400, "temperature must be in [0, 2], got 3.0."),
    ],
)
async def test_refusals(tool_model: Path, more: dict[str, Any], status: int, text: str) -> None:
    async with tool_server(tool_model, "x") as (_, client, _script):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.responses.create(**asked(**more))
    assert refused.value.status_code == status
    assert text in refused.value.body["message"]  # type: ignore[index]


async def test_an_interrupted_stream_ends_with_an_error(tool_model: Path) -> None:
    async with tool_server(tool_model, "one two three four", unavailable_after_s=0.2) as (frontend, _, script):
        script.step_s = 0.2
        frontend.write_each_token(script)
        body = {"input": "x", "stream": True}
        text = ""
        async with frontend.http.stream("POST", "/v1/responses", json=body) as reply:
            async for chunk in reply.aiter_text():
                text += chunk
                if "output_text.delta" in text and script.reject_hello is None:
                    script.pause()
                    script.reject_hello = "gone"
                    script.break_sessions()
    last = json.loads(text.strip().rpartition("data: ")[2])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert "\nevent: error\n" in text


async def test_input_tokens_are_counted_as_for_a_response(tool_model: Path) -> None:
    more: Any = {"instructions": "Be brief.", "tools": TOOLS}
    async with tool_server(tool_model, "Yes.") as (frontend, client, script):
        counted = await client.responses.input_tokens.count(**asked(**more))
        reply = await client.responses.create(**asked(**more))
        then = {"input": "And now?", "previous_response_id": reply.id}
        later = await client.responses.input_tokens.count(**asked(**then))
        assert (await client.responses.create(**asked(**then))).usage.input_tokens == later.input_tokens
        assert len(script.submissions) == 2
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_tokens.count(**asked(model="nobody"))
        wrong = await frontend.http.post("/v1/responses/input_tokens", json={"input": [{"type": "x"}]})
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", reply.usage.input_tokens)
    assert later.input_tokens > 0
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")


async def test_a_text_format_does_not_apply_to_required_calls(tool_model: Path) -> None:
    """Checks this since OpenAI accepts both, and helper libraries send both."""
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}}
    async with tool_server(tool_model, CALL) as (_, client, script):
        reply = await client.responses.create(**asked(tools=TOOLS, tool_choice="required", text=form))
        plain = await client.responses.create(**asked(tools=TOOLS, tool_choice="required"))
        with_form, without = (submission.sampling.structured_output for submission in script.submissions)
    assert [item.type for item in reply.output] == [item.type for item in plain.output] == ["function_call"]
    assert with_form == without
    assert reply.text.format.type == "json_schema"


async def test_responses_accept_vllms_sampling_fields(tool_model: Path) -> None:
    """Checks the fields of vLLM's own /v1/responses, which its users send in extra_body."""
    fields: dict[str, Any] = {
        "stop": ["sun", "moon"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -1},
        "structured_outputs": {"choice": ["It is sunny.", "x"]},
    }
    async with tool_server(tool_model, "It is sunny.") as (frontend, client, script):
        reply = await client.responses.create(**asked(extra_body=fields))
        sampling = script.submissions[0].sampling
        for name, wrong, field in (
            ("stop", [""], "stop"),
            ("structured_outputs", {"json": {"type": "nonsense"}}, "structured_outputs"),
            ("logit_bias", {"x": 1}, "logit_bias"),
            ("repetition_penalty", -1, "repetition_penalty"),
        ):
            answer = await frontend.http.post("/v1/responses", json=asked(**{name: wrong}))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        both = asked(structured_outputs={"choice": ["a"]}, text={"format": {"type": "json_object"}})
        assert (await frontend.http.post("/v1/responses", json=both)).status_code == 400
    assert reply.output_text == "It is sun"
    assert list(sampling.stop_token_ids) == [5]
    assert (sampling.min_tokens, sampling.repetition_penalty) == (2, 1.5)
    assert dict(sampling.logit_bias) == {7: -1}
    assert "It is sunny." in sampling.structured_output.structural_tag, "behind the reasoning"


async def test_stop_strings_count_in_the_content_only(tool_model: Path) -> None:
    async with tool_server(tool_model, THOUGHT) as (_, client, _script):
        reply = await client.responses.create(**asked(tools=TOOLS, extra_body={"stop": ["Malmö", '"']}))
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    assert json.loads(reply.output[2].arguments) == {"city": "Malmö 🙂"}
