"""What is submitted for an embedding, and what its client hears when schedulers come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from shared.columns import f32
from shared.pb.common.v1.pooling_pb2 import POOLER_MEAN, PoolingParams
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler


def asking(*prompts: list[int], **params: object) -> pb.EmbedRequest:
    inputs = [pb.EmbedInput(token_ids=pb.TokenIds(ids=ids)) for ids in prompts]
    return pb.EmbedRequest(inputs=inputs, pooling=PoolingParams(**params))  # type: ignore[arg-type]


async def test_a_prompt_is_submitted_that_samples_nothing(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        answer = await frontend.inference.Embed(asking([7, 8, 9], [5], pooler=POOLER_MEAN, dimensions=4))
        await frontend.inference.Embed(asking([7, 8, 9]))
    assert [f32(vector).tolist() for vector in answer.vectors] == [[3, 7], [1, 5]]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 0)
    first, _, last = script.submissions
    assert (first.samples_nothing, first.max_tokens, first.num_sequences) == (True, 0, 1)
    assert first.params.pooling == PoolingParams(pooler=POOLER_MEAN, dimensions=4, normalize=True)
    assert first.skip_reading_prefix_cache, "a mean reads every token"
    assert not last.skip_reading_prefix_cache


async def test_it_goes_on_when_its_session_breaks(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        script.pause()
        call = asyncio.ensure_future(frontend.inference.Embed(asking([7, 8, 9], [5])))
        await script.until(lambda: script.num_running == 2)
        script.break_sessions()
        await script.until(lambda: len(script.submissions) == 4)
        script.resume()
        answer = await asyncio.wait_for(call, 20)
    assert [f32(vector).tolist() for vector in answer.vectors] == [[3, 7], [1, 5]]


async def test_a_client_that_leaves_cancels_it(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        script.pause()
        call = frontend.inference.Embed(asking([7, 8, 9], [5]))
        waiting = asyncio.ensure_future(call)
        await script.until(lambda: script.num_running == 2)
        waiting.cancel()
        await script.until(lambda: sum(len(ids) for ids, _ in script.cancellations) == 2)


async def test_an_end_without_a_vector_is_an_error(folder: Path) -> None:
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
