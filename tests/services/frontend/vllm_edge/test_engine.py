"""Tests of vllm.grpc.engine in the way that routers use it: token ids in, token ids out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from quire.shared.pb.dialects import vllm_engine_pb2 as pb
from quire.shared.pb.dialects import vllm_engine_pb2_grpc
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_replies import replying
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPLY = "It is sunny."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


@pytest.fixture(scope="module")
def reply_ids(folder: Path) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(REPLY, add_special_tokens=False).ids
    return ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(folder: Path) -> AsyncIterator[tuple[Running, ScriptedScheduler]]:
    script = ScriptedScheduler(replying(folder, REPLY), max_model_len=4096)
    async with scheduler(script), running(folder, script.address) as frontend:
        frontend.write_each_token(script)
        yield frontend, script


@pytest.fixture(scope="module")
def stub(served: tuple[Running, ScriptedScheduler]) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(served[0].channel)


@pytest.fixture(scope="module")
def script(served: tuple[Running, ScriptedScheduler]) -> ScriptedScheduler:
    return served[1]


def request(*, stream: bool = False, request_id: str = "mine", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(original_text="", input_ids=[5, 6, 7]),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
    )


async def answers(stub: Any, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(message)]


async def test_final_only_samples_are_sent_in_one_piece(stub: Any, reply_ids: list[int]) -> None:
    [answer] = await answers(stub, request())
    complete = answer.complete
    assert list(complete.output_ids)[: len(reply_ids)] == reply_ids
    assert (complete.finish_reason, complete.prompt_tokens) == ("stop", 3)
    assert complete.completion_tokens == len(complete.output_ids)


async def test_a_stream_repeats_its_last_chunk_in_the_end(stub: Any, reply_ids: list[int]) -> None:
    *chunks, end = await answers(stub, request(stream=True))
    tokens = [token_id for one in chunks for token_id in one.chunk.token_ids]
    assert tokens[: len(reply_ids)] == reply_ids
    assert len(chunks) > 1
    assert [one.chunk.completion_tokens for one in chunks] == [len(one.chunk.token_ids) for one in chunks]
    assert list(end.complete.output_ids) == list(chunks[-1].chunk.token_ids)
    assert end.complete.finish_reason == "stop"


async def test_sampling_parameters_arrive_and_unset_ones_do_not(stub: Any, script: ScriptedScheduler) -> None:
    await answers(stub, request(temperature=0.3, top_p=0.9, top_k=4, max_tokens=2, seed=11, min_tokens=1))
    await answers(stub, request())
    full, bare = script.submissions[-2:]
    assert (full.sampling.temperature, full.sampling.top_p, full.sampling.top_k) == pytest.approx((0.3, 0.9, 4))
    assert (full.max_tokens, full.sampling.seed) == (2, 11)
    assert bare.sampling.top_p in (0.0, 1.0)  # both mean: all tokens
    assert bare.max_tokens > 100


async def test_output_constraints(stub: Any, script: ScriptedScheduler) -> None:
    await answers(stub, request(choice=pb.ChoiceConstraint(choices=["yes", "no"])))
    await answers(stub, request(regex="[ab]+"))
    choice, regex = (submission.sampling.structured_output for submission in script.submissions[-2:])
    assert list(choice.choice.options) == ["yes", "no"]
    assert regex.regex == "[ab]+"


async def test_stop_strings_match_although_no_text_is_sent(stub: Any) -> None:
    [answer] = await answers(stub, request(stop=["sun"]))
    assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("stop", "sun")


async def test_samples_have_an_index(stub: Any) -> None:
    answer = await answers(stub, request(n=3, temperature=1))
    assert sorted(one.complete.index for one in answer) == [0, 1, 2]


async def test_log_probabilities_of_output_and_prompt(stub: Any) -> None:
    [answer] = await answers(stub, request(logprobs=2, prompt_logprobs=1, max_tokens=2))
    output, prompt = answer.complete.output_logprobs, answer.complete.input_logprobs
    assert list(output.token_ids) == list(answer.complete.output_ids)
    assert [len(one.token_ids) for one in output.top_logprobs] == [2, 2]
    assert list(prompt.token_ids) == [5, 6, 7]
    assert [one.HasField("value") for one in prompt.token_logprobs] == [False, True, True]
    assert [len(one.values) for one in prompt.top_logprobs] == [0, 1, 1]


async def test_an_abort_ends_only_its_request(served: tuple[Running, ScriptedScheduler], stub: Any) -> None:
    frontend, script = served
    num_before = len(script.submissions)
    script.pause()
    calls = [asyncio.ensure_future(answers(stub, request(request_id=name))) for name in ("a", "b")]
    await script.until(lambda: len(script.submissions) == num_before + 2)
    await stub.Abort(pb.AbortRequest(request_ids=["a", "unknown"]))
    [ended] = await asyncio.wait_for(calls[0], 60)
    await script.until(lambda: script.num_running == 1)
    script.resume()
    [went_on] = await asyncio.wait_for(calls[1], 60)
    assert (ended.complete.finish_reason, list(ended.complete.output_ids)) == ("abort", [])
    assert went_on.complete.finish_reason == "stop"
    await frontend.until_idle()


async def test_an_abort_reaches_only_requests_of_the_same_key(folder: Path, tmp_path: Path) -> None:
    script = ScriptedScheduler(replying(folder, REPLY), max_model_len=4096)
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n  - {name: one, key: first-key-of-all, tenant: t}\n  - {name: two, key: second-key-of-all, tenant: t}\n"
    )
    keys.chmod(0o600)
    async with scheduler(script), running(folder, script.address, api_keys=str(keys)) as frontend:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(frontend.channel)
        first, second = ((("authorization", f"Bearer {name}-key-of-all"),) for name in ("first", "second"))
        script.pause()
        call = stub.Generate(request(request_id="a"), metadata=first)
        await script.until(lambda: script.num_running == 1)
        await stub.Abort(pb.AbortRequest(request_ids=["a"]), metadata=second)
        script.resume()
        [answer] = [one async for one in call]
    assert answer.complete.finish_reason == "stop"


async def test_one_vector(stub: Any) -> None:
    answer = await stub.Embed(pb.EmbedRequest(tokenized=pb.TokenizedInput(input_ids=[5, 6, 7])))
    assert (answer.embedding_dim, answer.prompt_tokens) == (len(answer.embedding), 3)
    assert answer.embedding_dim > 0


async def test_the_model_the_process_and_its_load(served: tuple[Running, ScriptedScheduler], stub: Any) -> None:
    await served[0].until_idle()
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    loads = await stub.GetLoads(pb.GetLoadsRequest())
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    assert (model.served_model_name, model.max_context_length, model.is_generation) == ("talking", 4096, True)
    assert list(model.eos_token_ids)
    assert "/" not in model.model_path
    assert (server.server_type, server.active_requests) == ("vllm-grpc", 0)
    assert [load.num_total_reqs for load in loads.loads] == [0]


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "input must be set"),
        (
            pb.GenerateRequest(text="x", mm_inputs=pb.Unread()),
            "UNIMPLEMENTED",
            "mm_inputs is not supported by this server; leave it out",
        ),
        (
            pb.GenerateRequest(text="x", data_parallel_rank=0),
            "UNIMPLEMENTED",
            "data_parallel_rank is not supported by this server; leave it out",
        ),
        (request(top_p=2), "INVALID_ARGUMENT", "top_p must be in (0, 1], got 2.0."),
    ],
)
async def test_invalid_and_unsupported_fields_are_named(
    stub: Any, message: pb.GenerateRequest, code: str, text: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await answers(stub, message)
    assert (failed.value.code().name, failed.value.details()) == (code, text)
