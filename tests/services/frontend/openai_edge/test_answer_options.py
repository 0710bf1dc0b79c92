"""Tests of stream intervals, prompt truncation and additional output, over both edges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from quire.services.frontend.output_processor.detokenizer import new_detokenizer
from quire.services.frontend.tokenizer import tokenizer as own
from quire.shared.columns import i32
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.input_processor.test_request_options import generate, serving
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, prompt_of, scheduler
from tests.services.frontend.tiny_folder import byte_level_tokenizer, write_folder

Sampling = sampling_pb2.SamplingParams
BODY = {"prompt": "the quick brown fox", "max_tokens": 20, "seed": 60}


def data_of(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def sizes(frontend: Running, **asked: Any) -> list[int]:
    """Returns the number of tokens in each chunk of a stream."""
    reply = await frontend.http.post(
        "/v1/completions", json={**BODY, "stream": True, "return_token_ids": True, **asked}
    )
    return [len(chunk["choices"][0]["token_ids"]) for chunk in data_of(reply.text)]


async def test_messages_of_a_stream_are_sent_at_intervals(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        frontend.write_each_token(script)
        assert await sizes(frontend, stream_interval=8) == [1, 8, 8, 3]
        request = pb.GenerateRequest(text="x", sampling=Sampling(max_tokens=20, seed=60))
        request.options.stream_interval = 12
        assert [len(message.token_ids) for message in await generate(frontend, request)] == [1, 12, 7]


async def test_the_servers_interval_is_the_least(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, stream_interval=5) as frontend:
        frontend.write_each_token(script)
        assert await sizes(frontend) == await sizes(frontend, stream_interval=2) == [1, 5, 5, 5, 4]
        assert await sizes(frontend, stream_interval=10) == [1, 10, 9]


async def test_truncation_keeps_the_requested_side(folder: Path, tokenizer: own.Tokenizer) -> None:
    ids = tokenizer.encode_inline(BODY["prompt"], add_special_tokens=False)
    async with serving(folder) as (script, frontend):
        for side in ({}, {"truncation_side": "left"}, {"truncation_side": "right"}):
            await frontend.http.post("/v1/completions", json={**BODY, "truncate_prompt_tokens": 2, **side})
        request = pb.GenerateRequest(text=BODY["prompt"], sampling=Sampling(max_tokens=1))
        request.options.truncate_prompt_tokens = 2
        request.options.truncation_side = "right"
        await generate(frontend, request)
        assert [prompt_of(s) for s in script.submissions] == [ids[-2:], ids[-2:], ids[:2], ids[:2]]
        wrong = await frontend.http.post("/v1/completions", json={**BODY, "truncation_side": "middle"})
        request.options.truncation_side = "middle"
        with pytest.raises(grpc.aio.AioRpcError, match="truncation_side must be 'left' or 'right', got 'middle'"):
            await generate(frontend, request)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "truncation_side")


async def test_the_prompt_as_the_model_got_it(folder: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "return_prompt_text": True}
    rendered = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    async with serving(folder) as (_, frontend):
        answer = (await frontend.http.post("/v1/chat/completions", json=chat)).json()
        opening, *rest = data_of((await frontend.http.post("/v1/chat/completions", json={**chat, "stream": True})).text)
        prompts = {"prompt": ["one two", "three"], "max_tokens": 2, "return_prompt_text": True}
        choices = (await frontend.http.post("/v1/completions", json=prompts)).json()["choices"]
    assert answer["prompt_text"] == opening["prompt_text"] == rendered
    assert not any("prompt_text" in chunk for chunk in rest)
    assert [choice["prompt_text"] for choice in choices] == ["one two", "three"]


async def test_the_times_of_a_request_are_sent_if_requested(folder: Path) -> None:
    parts = ["tokenize_time_ms", "schedule_time_ms", "prefill_time_ms", "decode_time_ms", "write_time_ms"]
    names = [
        "time_to_first_token_ms",
        "generation_time_ms",
        "queue_time_ms",
        "hop_time_ms",
        *parts,
        "mean_itl_ms",
        "tokens_per_second",
    ]
    body = {**BODY, "return_metrics": True}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "return_metrics": True, "seed": 60}
    async with serving(folder) as (script, frontend):
        script.step_s = 0.002
        frontend.write_each_token(script)
        for path, asked in (("/v1/completions", body), ("/v1/chat/completions", chat)):
            answer = (await frontend.http.post(path, json=asked)).json()
            times = answer["metrics"]
            assert list(times) == names
            assert times["generation_time_ms"] > 19, "20 tokens, a step of 2 ms each"
            assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 19, rel=0.01)
            assert times["tokens_per_second"] == pytest.approx(1e3 / times["mean_itl_ms"], rel=0.01)
            assert 0 <= times["queue_time_ms"] < times["time_to_first_token_ms"]
            whole = times["time_to_first_token_ms"] + times["generation_time_ms"]
            assert sum(times[part] for part in parts[:-1]) == pytest.approx(whole, abs=0.01)
            assert times["hop_time_ms"] + times["queue_time_ms"] >= times["schedule_time_ms"] - 0.01
            assert times["write_time_ms"] >= 0
            *others, last = data_of((await frontend.http.post(path, json={**asked, "stream": True})).text)
            assert (list(last["metrics"]), last["choices"], "usage" in last) == (names, [], False)
            assert not any("metrics" in chunk for chunk in others)
            usage = {"stream_options": {"include_usage": True}}
            *_, last = data_of((await frontend.http.post(path, json={**asked, "stream": True, **usage})).text)
            assert last["usage"]["completion_tokens"] == 20
            assert list(last["metrics"]) == names
            assert (await frontend.http.post(path, json={**asked, "n": 2})).json()["metrics"] is None
            assert "metrics" not in (await frontend.http.post(path, json={**asked, "return_metrics": False})).json()
        one = (await frontend.http.post("/v1/completions", json={**body, "max_tokens": 1})).json()["metrics"]
        assert (one["generation_time_ms"], one["mean_itl_ms"], one["tokens_per_second"]) == (0, None, None)


async def test_sample_times_over_grpc(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        script.step_s = 0.002
        frontend.write_each_token(script)
        request = pb.GenerateRequest(text="x", sampling=Sampling(n=2, max_tokens=20, seed=60))
        assert not any(message.HasField("times") for message in await generate(frontend, request))
        request.options.return_times = True
        *others, last = await generate(frontend, request)
    times = [message.times for message in (*others, last) if message.HasField("times")]
    assert len(times) == 2
    for sample_times in times:
        assert sample_times.generation_us > 19_000
        assert 0 < sample_times.first_token_us < sample_times.generation_us + 10_000_000
        assert sample_times.tokenize_us + sample_times.schedule_us + sample_times.prefill_us == pytest.approx(
            sample_times.first_token_us, abs=2000
        )
        assert sample_times.tokenize_us > 0
        assert sample_times.hop_us + sample_times.queue_us >= sample_times.schedule_us - 2
    assert times[0].decode_us == pytest.approx(times[0].generation_us, abs=2000)


async def test_named_tokens_need_logprobs_over_http(folder: Path) -> None:
    async with serving(folder) as (script, frontend):
        alone = await frontend.http.post("/v1/completions", json={**BODY, "logprob_token_ids": [5, 3]})
        await frontend.http.post("/v1/completions", json={**BODY, "logprob_token_ids": [5, 3], "logprobs": 0})
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "logprob_token_ids": [9]}
        await frontend.http.post("/v1/chat/completions", json={**chat, "max_tokens": 1})
        await generate(frontend, pb.GenerateRequest(text="x", sampling=Sampling(max_tokens=1, logprob_token_ids=[4])))
        assert [list(s.sampling.logprob_token_ids) for s in script.submissions] == [[5, 3], [9], [4]]
    assert alone.json()["error"]["message"] == "when using `logprob_token_ids`, `logprobs` must be set."
    assert alone.json()["error"]["param"] == "logprob_token_ids"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"top_logprobs": 5}),
        ("/v1/chat/completions", {"stream": True}),
        ("/v1/chat/completions/batch", {"top_logprobs": 5}),
    ],
)
@pytest.mark.parametrize("named", [[100], [100, 7, 50], [9, 7], [7]])
async def test_the_sampled_token_is_among_the_named_ones(
    folder: Path, path: str, more: dict[str, Any], named: list[int]
) -> None:
    """Checks vLLM's tests/entrypoints/openai/chat_completion/test_logprob_token_ids.py: once each, sampled or not."""
    messages: list[Any] = [{"role": "user", "content": "x"}]
    body = {"logprobs": True, "max_tokens": 2, "logprob_token_ids": named, "return_tokens_as_token_ids": True, **more}
    script = ScriptedScheduler(lambda sequence: (7, 9)[sequence.num_outputs % 2])
    async with scheduler(script), running(folder, script.address) as frontend:
        reply = await frontend.http.post(path, json={**body, "messages": [messages] if "batch" in path else messages})
    answers = data_of(reply.text) if more.get("stream") else [reply.json()]
    times = [answer["choices"][0]["logprobs"] for answer in answers]
    entries = [entry for logprobs in times if logprobs for entry in logprobs["content"]]
    assert len(entries) == 2
    for entry in entries:
        tokens = [int(candidate["token"].removeprefix("token_id:")) for candidate in entry["top_logprobs"]]
        sampled = int(entry["token"].removeprefix("token_id:"))
        assert tokens == (named if sampled in named else [sampled, *named])


async def test_only_the_requested_number_of_top_tokens_is_sent(folder: Path) -> None:
    async with serving(folder) as (_, frontend):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True, "top_logprobs": 3}
        (entry,) = (await frontend.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"][
            "content"
        ]
    assert len(entry["top_logprobs"]) == 3
    assert entry["token"] not in [candidate["token"] for candidate in entry["top_logprobs"]]


async def test_a_thinking_budget_is_sent_with_the_models_thinking_tokens(tmp_path: Path) -> None:
    thinker = byte_level_tokenizer()
    thinker.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    marks = [thinker.token_to_id("<think>"), thinker.token_to_id("</think>")]
    async with serving(write_folder(tmp_path, tokenizer=thinker)) as (script, frontend):
        for budget in (0, 7, -1, None):
            await frontend.http.post("/v1/completions", json={**BODY, "thinking_token_budget": budget})
        sampling = Sampling(max_tokens=1, thinking_token_budget=3)
        await generate(frontend, pb.GenerateRequest(text="x", sampling=sampling))
        bound = [s for s in script.submissions if s.sampling.HasField("thinking_token_budget")]
        assert [s.sampling.thinking_token_budget for s in bound] == [0, 7, 3]
        for submission in bound:
            columns = submission.params.think_start_token_ids, submission.params.think_end_token_ids
            assert [i32(column).tolist() for column in columns] == [[mark] for mark in marks]


async def test_a_thinking_budget_without_thinking_tokens_is_refused(folder: Path) -> None:
    async with serving(folder) as (_, frontend):
        reply = await frontend.http.post("/v1/completions", json={**BODY, "thinking_token_budget": 5})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize(("spaces", "text"), [(True, "a b <x> <y> a <x>"), (False, "a b <x><y> a <x>")])
def test_spaces_between_added_tokens(tmp_path: Path, spaces: bool, text: str) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_tokens([AddedToken("<x>", special=False), AddedToken("<y>", special=True)])
    spaced = own.Tokenizer(write_folder(tmp_path, tokenizer=words), threads=1)
    detokenizer = new_detokenizer(spaced, skip_special_tokens=False, spaces_between_special_tokens=spaces)
    assert "".join([*map(detokenizer.push, [0, 1, 3, 4, 0, 3]), detokenizer.flush()]) == text
