"""Tests with the unmodified openai package against a frontend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

TEXT = "hello world 你好 🙂 to everyone"


@asynccontextmanager
async def serving(folder: Path, script: ScriptedScheduler, **settings: Any) -> AsyncIterator[tuple[Running, Any]]:
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        key = settings.get("api_key") or "none"
        async with openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key=key, max_retries=0) as client:
            yield frontend, client


async def test_streamed_completions_equal_the_full_answer(folder: Path) -> None:
    async with serving(folder, ScriptedScheduler()) as (_, client):
        whole = await client.completions.create(model="tiny", prompt=TEXT, max_tokens=100)
        stream = await client.completions.create(
            model="tiny", prompt=TEXT, max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].text == TEXT
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(c.choices[0].text for c in chunks if c.choices) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == whole.usage.prompt_tokens + 1  # the end-of-sequence token
    assert whole.usage.prompt_tokens_details.cached_tokens == 0


async def test_streamed_chat_equals_the_full_answer(folder: Path) -> None:
    script = ScriptedScheduler()
    script.num_cached_tokens = 3
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    async with serving(folder, script) as (_, client):
        whole = await client.chat.completions.create(model="tiny", messages=messages)
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.role == "assistant"
    # the script echoes the prompt up to the first <|im_end|>
    assert whole.choices[0].message.content == f"user\n{TEXT}"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == f"user\n{TEXT}"
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens == 3


async def test_several_samples_and_prompts_have_an_index(folder: Path) -> None:
    async with serving(folder, ScriptedScheduler(count_up)) as (_, client):
        whole = await client.completions.create(
            model="tiny", prompt=["a", "b"], n=2, seed=10, max_tokens=3, extra_body={"return_token_ids": True}
        )
        stream = await client.completions.create(
            model="tiny",
            prompt=["a", [65, 66]],
            n=2,
            seed=10,
            max_tokens=3,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        streamed: dict[int, list[int]] = {}
        async for chunk in stream:
            streamed.setdefault(chunk.choices[0].index, []).extend(chunk.choices[0].token_ids)
    expected = [[10, 11, 12], [11, 12, 13], [10, 11, 12], [11, 12, 13]]
    assert [choice.token_ids for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.prompt_tokens == 2
    assert whole.usage.completion_tokens == 12
    assert [streamed[i] for i in range(4)] == expected


async def test_logprobs_in_both_formats(folder: Path) -> None:
    async with serving(folder, ScriptedScheduler()) as (_, client):
        completion = await client.completions.create(model="tiny", prompt="hello world", logprobs=2, max_tokens=3)
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, max_tokens=2
        )
        as_ids = await client.completions.create(
            model="tiny", prompt=[65], logprobs=0, max_tokens=1, extra_body={"return_tokens_as_token_ids": True}
        )
    logprobs = completion.choices[0].logprobs
    assert "".join(logprobs.tokens) == completion.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 3
    assert all(len(top) == 3 for top in logprobs.top_logprobs)
    assert all(next(iter(top)) == token for top, token in zip(logprobs.top_logprobs, logprobs.tokens, strict=True))
    lengths = [len(token) for token in logprobs.tokens]
    assert logprobs.text_offset == [0, lengths[0], lengths[0] + lengths[1]]
    entry = chat.choices[0].logprobs.content[1]
    assert entry.logprob == -0.5
    assert bytes(entry.bytes).decode() == entry.token
    assert [top.logprob for top in entry.top_logprobs] == [-1.0, -2.0]
    assert as_ids.choices[0].logprobs.tokens == ["token_id:65"]
    assert as_ids.choices[0].logprobs.top_logprobs == [{"token_id:65": -0.5}]


async def test_streamed_logprobs_join_to_the_full_list(folder: Path) -> None:
    async with serving(folder, ScriptedScheduler()) as (_, client):
        asked: dict[str, Any] = {"model": "tiny", "prompt": TEXT, "logprobs": 1, "max_tokens": 50}
        whole = (await client.completions.create(**asked)).choices[0].logprobs
        parts = [c.choices[0].logprobs async for c in await client.completions.create(**asked, stream=True)]
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset


async def test_tokens_with_partial_characters_are_distinct(folder: Path) -> None:
    async with serving(folder, ScriptedScheduler()) as (_, client):
        reply = await client.completions.create(model="tiny", prompt="🙃é", logprobs=1, max_tokens=20)
    logprobs = reply.choices[0].logprobs
    assert logprobs.tokens[0].startswith("bytes:\\xf0")
    assert logprobs.text_offset[-1] == len(reply.choices[0].text) == 2  # the last token completes the text


async def test_stop_strings(folder: Path) -> None:
    async with serving(folder, ScriptedScheduler()) as (frontend, client):
        cut = await client.completions.create(model="tiny", prompt=TEXT, max_tokens=90, stop=["好 ", "zzz"])
        kept = await client.completions.create(
            model="tiny", prompt=TEXT, max_tokens=90, stop="好 ", extra_body={"include_stop_str_in_output": True}
        )
        metrics = await frontend.metrics()
    assert cut.choices[0].text == "hello world 你"
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", "好 ")
    assert kept.choices[0].text == "hello world 你好 "
    assert metrics["quire_frontend_cancellations_total{reason=stop_string}"] == 2


async def test_models(folder: Path) -> None:
    async with serving(folder, ScriptedScheduler()) as (_, client):
        models = [model async for model in client.models.list()]
        one = await client.models.retrieve("tiny")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="x")
    assert [model.id for model in models] == ["tiny"] == [one.id]
    assert one.max_model_len == 512
    assert one.ready
    assert missing.value.body == {
        "message": "The model `other` does not exist; available: tiny.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }


async def test_errors_have_the_classes_of_openais_client(folder: Path) -> None:
    async with serving(folder, ScriptedScheduler()) as (_, client):
        with pytest.raises(openai.BadRequestError, match="temperature must be in") as refused:
            await client.completions.create(model="tiny", prompt="x", temperature=3.0)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="Unrecognized request argument supplied: temprature"):
            await client.completions.create(model="tiny", prompt="x", extra_body={"temprature": 1})
        with pytest.raises(openai.BadRequestError, match="modalities is not supported") as missing:
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], modalities=["audio"]
            )
        assert missing.value.code == "not_offered"


async def test_api_key(folder: Path) -> None:
    async with serving(folder, ScriptedScheduler(), api_key="secret") as (frontend, client):
        assert (await client.models.list()).data[0].id == "tiny"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        assert (await frontend.http.get("/health")).status_code == 200
        assert (await frontend.http.get("/v1/models")).status_code == 401


async def test_a_message_has_openais_fields_and_can_be_sent_back(folder: Path) -> None:
    async with scheduler(ScriptedScheduler(count_up)) as script, running(folder, script.address) as frontend:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
        first = (await frontend.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})).json()
        message = first["choices"][0]["message"]
        again = {"messages": [*messages, message, *messages], "max_tokens": 2}
        second = await frontend.http.post("/v1/chat/completions", json=again)
    assert (message["refusal"], message["annotations"]) == (None, [])
    assert second.status_code == 200
