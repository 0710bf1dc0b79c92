"""Tests of prompt log-probabilities: over both edges, once each, also if a session breaks meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.input_processor.test_request_options import generate, serving
from tests.services.frontend.openai_edge.test_answer_options import data_of
from tests.waiting import eventually

Sampling = sampling_pb2.SamplingParams
PROMPT = "the quick brown fox jumps"
BODY = {"prompt": PROMPT, "max_tokens": 2, "seed": 60}


@pytest.fixture
def ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_inline(PROMPT, add_special_tokens=False)


def reported(messages: list[Any]) -> list[tuple[int, float, int]]:
    return [(e.token_id, e.logprob, e.rank) for message in messages for e in message.prompt_logprobs]


def expected(ids: list[int], first: int = 1) -> list[tuple[int, float, int]]:
    return [(ids[p], -float(p), p) for p in range(first, len(ids))]


async def test_prompt_logprobs_are_in_the_first_message_of_the_first_sample(folder: Path, ids: list[int]) -> None:
    async with serving(folder) as (script, frontend):
        script.prompt_positions_per_step = 2
        sampling = Sampling(n=3, max_tokens=4, seed=60, prompt_logprobs=2)
        messages = await generate(frontend, pb.GenerateRequest(text=PROMPT, sampling=sampling))
        whole = pb.GenerateRequest(text=PROMPT, sampling=sampling, options=pb.RequestOptions(final_only=True))
        finals = await generate(frontend, whole)
    for found in (messages, finals):
        assert reported(found) == expected(ids)
        (bearer,) = [message for message in found if message.prompt_logprobs]
        assert bearer.index == 0
        assert [(c.token_id, c.logprob) for c in bearer.prompt_logprobs[0].top] == [
            ((ids[1] + 1) % 200, -1.0),
            ((ids[1] + 2) % 200, -2.0),
        ]


async def test_a_broken_session_neither_repeats_nor_loses_tokens(folder: Path, ids: list[int]) -> None:
    async with serving(folder) as (script, frontend):
        script.prompt_positions_per_step = 1
        script.step_s = 0.02
        request = pb.GenerateRequest(text=PROMPT, sampling=Sampling(max_tokens=3, seed=60, prompt_logprobs=0))
        call = frontend.inference.Generate(request)
        await script.until(lambda: any(r.num_reported > 1 for s in script.sessions for r in s.running.values()))
        script.pause()
        await eventually(lambda: any(sequence.num_prompt_logprobs > 1 for sequence in frontend.live))
        script.break_sessions()
        script.resume()
        assert reported([message async for message in call]) == expected(ids)
        again = script.submissions[-1].sampling
        assert (len(script.submissions), again.prompt_logprobs) == (2, 0)
        assert again.prompt_logprob_start > 1


async def test_samples_that_migrate_after_the_prompt_do_not_request_prompt_logprobs_again(
    folder: Path, ids: list[int]
) -> None:
    async with serving(folder) as (script, frontend):
        script.step_s = 0.02
        named = [sampling_pb2.NamedTokens(ids=[3])]
        sampling = Sampling(n=2, max_tokens=30, seed=60, prompt_logprob_token_ids=named)
        call = frontend.inference.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling))
        await script.until(lambda: script.most_outputs > 3)
        script.pause()
        await frontend.until_caught_up(script)
        script.break_sessions()
        script.resume()
        assert reported([message async for message in call]) == expected(ids)
        assert len(script.submissions) == 3
        for submission in script.submissions[1:]:
            assert not submission.sampling.HasField("prompt_logprobs")
            assert not submission.sampling.prompt_logprob_token_ids


async def test_flat_prompt_logprobs_are_arrays(folder: Path, ids: list[int]) -> None:
    async with serving(folder) as (_, frontend):
        sampling = Sampling(max_tokens=3, seed=60, logprobs=1, prompt_logprobs=0, flat_logprobs=True)
        messages = await generate(frontend, pb.GenerateRequest(text=PROMPT, sampling=sampling))
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")], sampling=sampling)
        chat_messages = [message async for message in frontend.inference.Chat(chat)]
    assert not any(message.logprobs or message.prompt_logprobs for message in [*messages, *chat_messages])
    prompt = messages[0].flat_prompt_logprobs
    assert (list(prompt.token_ids), list(prompt.ranks)) == (ids[1:], list(range(1, len(ids))))
    assert list(prompt.entry_counts) == [1] * (len(ids) - 1)
    output = [message.flat_logprobs for message in messages if message.HasField("flat_logprobs")]
    assert [token for arrays in output for token in arrays.token_ids] == [60, 61, 61, 62, 62, 63]
    assert [count for arrays in output for count in arrays.entry_counts] == [2, 2, 2]
    assert [value for arrays in output for value in arrays.logprobs] == [-0.5, -1.0] * 3
    assert chat_messages[0].flat_prompt_logprobs.ranks


async def test_http_lists_prompt_logprobs_by_token_id(folder: Path, ids: list[int], tokenizer: Tokenizer) -> None:
    async with serving(folder) as (_, frontend):
        body = {**BODY, "n": 2, "prompt_logprobs": 1}
        choices = (await frontend.http.post("/v1/completions", json=body)).json()["choices"]
        late = (await frontend.http.post("/v1/completions", json={**body, "n": 1, "prompt_logprob_start": 3})).json()
        chat = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0, "max_tokens": 1}
        chat_answer = (await frontend.http.post("/v1/chat/completions", json=chat)).json()
    first, *rest = choices[0]["prompt_logprobs"]
    assert first is None
    assert choices[1]["prompt_logprobs"] == choices[0]["prompt_logprobs"]
    assert [list(position) for position in rest] == [[str(i), str((i + 1) % 200)] for i in ids[1:]]
    own, other = rest[1].values()
    assert own == {"logprob": -2.0, "rank": 2, "decoded_token": tokenizer.token_bytes(ids[2]).decode()}
    assert (other["logprob"], other["rank"]) == (-1.0, 1)
    assert len(late["choices"][0]["prompt_logprobs"]) == len(ids) - 3
    assert chat_answer["prompt_logprobs"][0] is None
    assert len(chat_answer["prompt_logprobs"]) == chat_answer["usage"]["prompt_tokens"]


async def test_echo_puts_prompt_logprobs_before_the_output(folder: Path, ids: list[int], tokenizer: Tokenizer) -> None:
    texts = [tokenizer.token_bytes(i).decode() for i in ids]
    async with serving(folder) as (_, frontend):
        body = {**BODY, "echo": True, "logprobs": 1}
        choice = (await frontend.http.post("/v1/completions", json=body)).json()["choices"][0]
        chunks = data_of((await frontend.http.post("/v1/completions", json={**body, "stream": True})).text)
        scored = (await frontend.http.post("/v1/completions", json={**body, "max_tokens": 0})).json()
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert choice["prompt_logprobs"] is None
    assert logprobs["tokens"][: len(ids)] == texts
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [None, *(-float(p) for p in range(1, len(ids))), -0.5, -0.5]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(ids) + 2)]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [x for part in streamed for x in part[name]] for name in logprobs} == logprobs
    (alone,) = scored["choices"]
    assert (alone["text"], alone["finish_reason"], scored["usage"]["completion_tokens"]) == (PROMPT, "length", 0)
    assert alone["logprobs"] == {name: values[: len(ids)] for name, values in logprobs.items()}


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "`prompt_logprobs` are not available when"),
        ({"prompt_logprobs": 1, "prompt_logprob_start": 99}, "prompt_logprob_start", "less than the prompt's length, "),
        ({"prompt_logprob_token_ids": [[1]] * 99}, "prompt_logprob_token_ids", "has 99 positions from 0 on"),
        ({"echo": True, "logprobs": 1, "prompt_logprob_start": 2}, "prompt_logprob_start", "needs the whole prompt"),
        ({"echo": True, "logprobs": 1, "stream": True, "n": 2}, "n", "n must be 1 when streaming an echo"),
    ],
)
async def test_unavailable_prompt_logprobs_are_refused(
    folder: Path, fields: dict[str, Any], field: str, text: str
) -> None:
    async with serving(folder) as (_, frontend):
        reply = await frontend.http.post("/v1/completions", json={**BODY, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert text in reply.json()["error"]["message"]
