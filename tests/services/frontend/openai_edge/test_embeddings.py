"""Tests of submissions for embeddings, and of their results when schedulers fail and return."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import numpy as np
import pytest

from quire.shared.columns import f32, u32
from quire.shared.pb.common.v1.pooling_pb2 import POOLER_ALL, POOLER_MEAN, POOLER_STEP, PoolingParams
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, prompt_of, scheduler


def asking(*prompts: list[int], **params: object) -> pb.EmbedRequest:
    inputs = [pb.EmbedInput(token_ids=pb.TokenIds(ids=ids)) for ids in prompts]
    return pb.EmbedRequest(inputs=inputs, pooling=PoolingParams(**params))  # type: ignore[arg-type]


async def test_a_prompt_is_submitted_without_samples(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        answer = await frontend.inference.Embed(asking([7, 8, 9], [5], pooler=POOLER_MEAN, dimensions=4))
        await frontend.inference.Embed(asking([7, 8, 9]))
    assert [f32(vector).tolist() for vector in answer.vectors] == [[3, 7], [1, 5]]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 0)
    first, _, last = script.submissions
    assert (first.samples_nothing, first.max_tokens, first.num_sequences) == (True, 0, 1)
    assert first.params.pooling == PoolingParams(pooler=POOLER_MEAN, dimensions=4)
    assert first.skip_reading_prefix_cache, "a mean reads every token"
    assert not last.skip_reading_prefix_cache


async def test_more_inputs_than_a_call_may_have_are_refused_with_the_remedy(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        reply = await frontend.http.post("/v1/embeddings", json={"model": folder.name, "input": ["a"] * 1025})
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert message.startswith("a request may have at most 1024 inputs in all, got 1025; send several requests")
    assert not script.submissions


async def test_the_frontend_continues_after_a_broken_session(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        script.pause()
        call = asyncio.ensure_future(frontend.inference.Embed(asking([7, 8, 9], [5])))
        await script.until(lambda: script.num_running == 2)
        script.break_sessions()
        await script.until(lambda: len(script.submissions) == 4)
        script.resume()
        answer = await asyncio.wait_for(call, 60)
    assert [f32(vector).tolist() for vector in answer.vectors] == [[3, 7], [1, 5]]


async def test_a_disconnected_client_cancels_the_call(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        script.pause()
        call = frontend.inference.Embed(asking([7, 8, 9], [5]))
        waiting = asyncio.ensure_future(call)
        await script.until(lambda: script.num_running == 2)
        waiting.cancel()
        await script.until(lambda: sum(len(ids) for ids, _ in script.cancellations) == 2)
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_finish_without_a_vector_is_an_error(folder: Path) -> None:
    script = ScriptedScheduler()
    script.gives_vectors = False
    async with scheduler(script), running(folder, script.address) as frontend:
        answer = await frontend.http.post("/v1/embeddings", json={"input": [7, 8]})
        assert answer.status_code == 500
        script.gives_vectors = True
        answer = await frontend.http.post("/v1/embeddings", json={"input": [7, 8]})
        assert np.array(answer.json()["data"][0]["embedding"]).tolist() == [2, 7]


@pytest.mark.parametrize("inputs", [[], [pb.EmbedInput()]])
async def test_inputs_are_text_or_token_ids(folder: Path, inputs: list[pb.EmbedInput]) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        with pytest.raises(Exception, match="inputs"):
            await frontend.inference.Embed(pb.EmbedRequest(inputs=inputs))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_normalize_has_a_second_name(folder: Path, path: str) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        for asked in ({"use_activation": False}, {"use_activation": True, "normalize": True}, {}):
            assert (await frontend.http.post(path, json={"input": [7], **asked})).status_code == 200
        both = {"input": [7], "use_activation": False, "normalize": True}
        refused = await frontend.http.post(path, json=both)
    sent = [one.params.pooling for one in script.submissions]
    assert [one.HasField("normalize") and one.normalize for one in sent] == [False, True, False]
    assert [one.HasField("normalize") for one in sent] == [True, True, False]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "use_activation")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_a_conversation_is_pooled_as_its_template_shows_it(folder: Path, path: str) -> None:
    script = ScriptedScheduler()
    asked = {"messages": [{"role": "user", "content": "a"}]}
    async with scheduler(script), running(folder, script.address) as frontend:
        for more in ({}, {"add_generation_prompt": True}, {"add_special_tokens": True}):
            assert (await frontend.http.post(path, json=asked | more)).status_code == 200
        without = await frontend.http.post(path, json={"messages": None})
        misspelt = await frontend.http.post(path, json=asked | {"add_generation_promt": True})
        tokenizer = frontend.frontend.model.tokenizer
        turn, begun, *_ = (
            tokenizer.encode_inline(text, add_special_tokens=False)
            for text in ("<|im_start|>user\na<|im_end|>\n", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
        )
    assert [list(prompt_of(one)) for one in script.submissions[:2]] == [turn, begun]
    assert (without.status_code, without.json()["error"]["param"]) == (400, "input")
    assert (misspelt.status_code, misspelt.json()["error"]["param"]) == (400, "add_generation_promt")


async def test_token_vectors(folder: Path) -> None:
    """Checks token vectors as lists, as packed floats and over gRPC; calls for a single vector refuse them."""
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        asked = {"input": [7, 8], "pooler": "all"}
        listed = (await frontend.http.post("/pooling", json=asked)).json()
        packed = (await frontend.http.post("/pooling", json=asked | {"encoding_format": "base64"})).json()
        single = (await frontend.http.post("/pooling", json={"input": [[9]], "task": "token_embed"})).json()
        message = await frontend.inference.Embed(asking([7, 8], [5, 5], pooler=POOLER_ALL))
        refused = await frontend.http.post("/v1/embeddings", json=asked)
    assert listed["data"] == [{"object": "pooling", "index": 0, "data": [[2], [7]]}]
    assert np.frombuffer(base64.b64decode(packed["data"][0]["data"]), "<f4").tolist() == [2, 7]
    assert single["data"][0]["data"] == [[1, 9]]
    assert (u32(message.num_rows).tolist(), f32(message.vectors[1]).tolist()) == ([2, 2], [2, 5])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pooler")
    assert all(one.skip_reading_prefix_cache for one in script.submissions), "every token is read"


async def test_steps_are_found_by_their_tag(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        asked = {"input": [7, 9, 8, 9], "pooler": "step", "step_tag_id": 9}
        answer = (await frontend.http.post("/pooling", json=asked)).json()
        refused = [
            await frontend.http.post("/pooling", json=asked | changes)
            for changes in ({"step_tag_id": 5}, {"step_tag_id": None}, {"pooler": "mean"}, {"step_tag_id": -1})
        ]
    assert answer["data"][0]["data"] == [[4], [7]]
    assert script.submissions[0].params.pooling == PoolingParams(pooler=POOLER_STEP, step_tag_id=9)
    assert [(one.status_code, one.json()["error"]["param"]) for one in refused] == [(400, "step_tag_id")] * 4


async def test_vectors_are_streamed_as_they_are_computed(folder: Path) -> None:
    """Checks that each message has its input's index, and the last one the usage; a failed input ends the call."""
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        asked = pb.EmbedStreamRequest(embed=asking([7, 8, 9], [5], [6, 6]))
        messages = [message async for message in frontend.inference.EmbedStream(asked)]
        of_tokens = pb.EmbedStreamRequest(embed=asking([7, 8], pooler=POOLER_ALL))
        rows = [m async for m in frontend.inference.EmbedStream(of_tokens)]
        script.gives_vectors = False
        with pytest.raises(Exception, match="without its vector"):
            [message async for message in frontend.inference.EmbedStream(asked)]
    assert {m.index: f32(m.vector).tolist() for m in messages} == {0: [3, 7], 1: [1, 5], 2: [2, 6]}
    assert [m.usage.prompt_tokens for m in messages] == [0, 0, 6]
    assert [(m.num_rows, m.usage.prompt_tokens) for m in rows] == [(2, 2)]
