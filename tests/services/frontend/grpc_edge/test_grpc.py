"""InferenceService and AdminService over real gRPC, also with a client that only uses reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1 import finish_pb2, sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, prompt_of, scheduler

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "hello world 你好 🙂"
Sampling = sampling_pb2.SamplingParams


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def script() -> AsyncIterator[ScriptedScheduler]:
    async with scheduler(ScriptedScheduler()) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(folder: Path, script: ScriptedScheduler) -> AsyncIterator[Running]:
    async with running(folder, script.address) as started:
        yield started


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    return refused.value


async def test_generate_streams_tokens_and_text(frontend: Running, script: ScriptedScheduler) -> None:
    script.num_cached_tokens = 2
    options = pb.RequestOptions(request_id="mine", tenant="t")
    messages = [m async for m in frontend.inference.Generate(pb.GenerateRequest(text=TEXT, options=options))]
    script.num_cached_tokens = 0
    prompt = prompt_of(script.submissions[-1])
    assert "".join(m.text for m in messages) == TEXT
    assert [i for m in messages for i in m.token_ids][:-1] == prompt
    assert {m.request_id for m in messages} == {"mine"}
    assert messages[0].usage == finish_pb2.Usage(
        prompt_tokens=len(prompt), cached_tokens=2, completion_tokens=len(messages[0].token_ids)
    )
    assert messages[-1].finish_reason == finish_pb2.FINISH_REASON_STOP
    assert messages[-1].WhichOneof("stop_reason") is None
    assert messages[-1].usage.completion_tokens == len(prompt) + 1
    assert all(m.finish_reason == 0 and not m.HasField("usage") for m in messages[1:-1])
    assert script.submissions[-1].sampling.max_tokens == 512 - len(prompt)
    assert script.submissions[-1].tenant == "t"


async def test_generate_from_tokens_and_from_a_conversation(frontend: Running, script: ScriptedScheduler) -> None:
    few = Sampling(max_tokens=2)
    tokens = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70, 71]), sampling=few)
    out = [i async for m in frontend.inference.Generate(tokens) for i in m.token_ids]
    assert out == [70, 71]
    said = [pb.ChatMessage(role="user", content="hi")]
    async for _ in frontend.inference.Generate(
        pb.GenerateRequest(conversation=pb.Conversation(messages=said), sampling=few)
    ):
        pass
    by_generate = prompt_of(script.submissions[-1])
    chat = pb.ChatRequest(messages=said, sampling=few)
    content = "".join([m.content async for m in frontend.inference.Chat(chat)])
    assert prompt_of(script.submissions[-1]) == by_generate
    assert content


async def test_samples_logprobs_and_stop_tokens(frontend: Running, script: ScriptedScheduler) -> None:
    script.model, echo = count_up, script.model
    sampling = Sampling(n=2, seed=20, stop_token_ids=[23], logprobs=1, max_tokens=5)
    messages = [m async for m in frontend.inference.Generate(pb.GenerateRequest(text="x", sampling=sampling))]
    script.model = echo
    tokens = {i: [t for m in messages if m.index == i for t in m.token_ids] for i in (0, 1)}
    assert tokens == {0: [20, 21, 22, 23], 1: [21, 22, 23]}
    last = [m for m in messages if m.finish_reason]
    assert [m.stop_token_id for m in last] == [23, 23]
    entries = [entry for m in messages if m.index == 0 for entry in m.logprobs]
    assert [entry.token_id for entry in entries] == tokens[0]
    assert all((e.logprob, e.rank, len(e.top), e.top[0].logprob) == (-0.5, 1, 1, -1.0) for e in entries)


async def test_several_tokens_a_step(frontend: Running, script: ScriptedScheduler) -> None:
    script.tokens_per_step = 3
    sampling = Sampling(stop=["world"], logprobs=0)
    messages = [m async for m in frontend.inference.Generate(pb.GenerateRequest(text=TEXT, sampling=sampling))]
    script.tokens_per_step = 1
    tokens = [i for m in messages for i in m.token_ids]
    assert "".join(m.text for m in messages) == "hello "
    assert messages[-1].stop_string == "world"
    assert len(tokens) == sum(len(m.logprobs) for m in messages) == messages[-1].usage.completion_tokens
    full = (await frontend.inference.Detokenize(pb.DetokenizeRequest(token_ids=tokens))).text
    assert full.startswith("hello world")
    assert len(tokens) < len(prompt_of(script.submissions[-1]))


@pytest.mark.parametrize(
    ("request_", "code", "field", "text"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt", "prompt must be set"),
        (pb.GenerateRequest(text=""), "INVALID_ARGUMENT", "prompt", "prompt: it is empty; send at least one token"),
        (
            pb.GenerateRequest(text="x", sampling=Sampling(temperature=2.4)),
            "INVALID_ARGUMENT",
            "temperature",
            "temperature must be in [0, 2], got 2.4.",
        ),
        (
            pb.GenerateRequest(text="x", sampling=Sampling(beam_search={"width": 2}, stop=["x"])),
            "INVALID_ARGUMENT",
            "stop",
            "stop is not supported together with beam search.",
        ),
        (
            pb.GenerateRequest(
                text="x", sampling=Sampling(structured_output=sampling_pb2.StructuredOutput(regex="(a"))
            ),
            "INVALID_ARGUMENT",
            "structured_output",
            'structured_output: it cannot be compiled: invalid regex "(a" (in regex): regex parse error: (a ^ error: '
            "unclosed group",
        ),
        (
            pb.GenerateRequest(text="x", options=pb.RequestOptions(priority=1)),
            "UNIMPLEMENTED",
            "priority",
            "priority needs the scheduling policy 'priority'; the schedulers' policy is fcfs",
        ),
        (
            pb.GenerateRequest(text="x", options=pb.RequestOptions(request_id="r" * 257)),
            "INVALID_ARGUMENT",
            "request_id",
            "request_id must have at most 256 characters, got 257.",
        ),
        (
            pb.GenerateRequest(text="x", options=pb.RequestOptions(kv_priority="top")),
            "INVALID_ARGUMENT",
            "kv_priority",
            "kv_priority must be one of low, normal, high, got 'top'.",
        ),
        (
            pb.GenerateRequest(text="x", model="other"),
            "NOT_FOUND",
            "model",
            "The model `other` does not exist; available: tiny.",
        ),
    ],
)
async def test_refusals(frontend: Running, request_: pb.GenerateRequest, code: str, field: str, text: str) -> None:
    error = await refusal(frontend.inference.Generate(request_))
    assert (error.code().name, error.details()) == (code, text)
    detail = error_details_pb2.BadRequest()
    assert rpc_status.from_call(error).details[0].Unpack(detail)
    assert detail.field_violations[0].field == field


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (pb.ChatRequest(), "messages must contain at least one message"),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="nobody")]),
            "messages: role must be one of system, developer, user, assistant, tool, got 'nobody'",
        ),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="user")], chat_template_kwargs="[]"),
            "chat_template_kwargs must be a JSON object",
        ),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")], tools=[pb.Tool(name="f")]),
            "tools: the tool-call format of this model is unknown; start the server with --tool-call-parser, one of ",
        ),
    ],
)
async def test_chat_refusals(frontend: Running, request_: pb.ChatRequest, text: str) -> None:
    assert ((await refusal(frontend.inference.Chat(request_))).details() or "").startswith(text)


async def test_developer_turns_are_instructions(frontend: Running, script: ScriptedScheduler) -> None:
    """As over HTTP; a template without developer turns gets them as system turns."""
    for role in ("system", "developer"):
        turns = [pb.ChatMessage(role=role, content="Be brief."), pb.ChatMessage(role="user", content="hi")]
        async for _ in frontend.inference.Chat(pb.ChatRequest(messages=turns, sampling=Sampling(max_tokens=2))):
            pass
    first, second = script.submissions[-2:]
    assert prompt_of(first) == prompt_of(second)


async def test_longer_output_than_fits_is_refused_as_over_http(frontend: Running) -> None:
    for sampling in (Sampling(max_tokens=100_000), Sampling(max_tokens=512)):
        refused = await refusal(frontend.inference.Generate(pb.GenerateRequest(text="x", sampling=sampling)))
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "context length is 512 tokens" in (refused.details() or "")


async def test_without_a_length_the_output_may_be_as_long_as_fits(frontend: Running, script: ScriptedScheduler) -> None:
    assert [m async for m in frontend.inference.Generate(pb.GenerateRequest(text="x"))]
    assert script.submissions[-1].sampling.max_tokens == 511


async def test_tokenize_detokenize_and_models(frontend: Running) -> None:
    tokens = await frontend.inference.Tokenize(pb.TokenizeRequest(text=TEXT))
    assert tokens.max_model_len == 512
    back = await frontend.inference.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert back.text == TEXT
    listed = (await frontend.inference.ListModels(pb.ListModelsRequest())).models
    one = (await frontend.inference.GetModel(pb.GetModelRequest(model="tiny"))).model
    assert [one] == list(listed)
    assert (one.name, one.max_model_len, one.ready) == ("tiny", 512, True)
    with pytest.raises(grpc.aio.AioRpcError, match="does not exist"):
        await frontend.inference.GetModel(pb.GetModelRequest(model="other"))


async def test_health_by_service_name(frontend: Running) -> None:
    stub = health_pb2_grpc.HealthStub(frontend.channel)
    for name in ("", "quire.inference.v1.InferenceService"):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_a_client_made_from_reflection_alone(frontend: Running, version: str) -> None:
    pool = descriptor_pool.DescriptorPool()
    await _learn(frontend.channel, "quire.inference.v1.InferenceService", pool, version)
    service = pool.FindServiceByName("quire.inference.v1.InferenceService")
    method = service.FindMethodByName("Generate")
    Request, Response = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
    call = frontend.channel.unary_stream(
        f"/{service.full_name}/{method.name}",
        request_serializer=Request.SerializeToString,
        response_deserializer=Response.FromString,
    )
    request_ = Request(text=TEXT)
    request_.sampling.temperature = 0.0
    assert "".join([message.text async for message in call(request_)]) == TEXT


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_every_service_that_reflection_lists_it_also_describes(frontend: Running, version: str) -> None:
    ask_server = _reflection(frontend.channel, version)
    reply = await anext(aiter(ask_server(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))))
    listed = [service.name for service in reply.list_services_response.service]
    assert {f"grpc.reflection.{v}.ServerReflection" for v in ("v1", "v1alpha")} < set(listed)
    for name in listed:
        pool = descriptor_pool.DescriptorPool()
        await _learn(frontend.channel, name, pool, version)
        assert pool.FindServiceByName(name).methods, name


def _reflection(channel: grpc.aio.Channel, version: str) -> grpc.aio.StreamStreamMultiCallable:
    return channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )


async def _learn(channel: grpc.aio.Channel, symbol: str, pool: descriptor_pool.DescriptorPool, version: str) -> None:
    """Adds the files that define a symbol, imports first."""
    ask_server = _reflection(channel, version)

    async def fetch(**ask: str) -> descriptor_pb2.FileDescriptorProto:
        call = ask_server(iter([reflection_pb2.ServerReflectionRequest(**ask)]))
        reply = await anext(aiter(call))
        return descriptor_pb2.FileDescriptorProto.FromString(reply.file_descriptor_response.file_descriptor_proto[0])

    known: set[str] = set()

    async def add(file: descriptor_pb2.FileDescriptorProto) -> None:
        known.add(file.name)
        for name in file.dependency:
            if name not in known:
                await add(await fetch(file_by_filename=name))
        pool.Add(file)

    await add(await fetch(file_containing_symbol=symbol))


async def test_admin_covers_the_cluster(frontend: Running, script: ScriptedScheduler) -> None:
    status = (await frontend.admin.GetStatus(admin_pb2.GetStatusRequest())).services
    assert [s.role for s in status] == [admin_pb2.ROLE_FRONTEND, admin_pb2.ROLE_SCHEDULER]
    assert status[0].state == admin_pb2.STATE_READY
    assert status[0].address == frontend.frontend.grpc_address
    assert status[1].address == script.address
    reset = await frontend.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
    assert (reset.num_blocks, script.resets) == (7, 1)
    mode = admin_pb2.PAUSE_MODE_ABORT
    paused = await frontend.admin.PauseGeneration(admin_pb2.PauseGenerationRequest(mode=mode))
    assert (paused.num_kept, paused.num_aborted, script.pause_mode) == (3, 4, mode)
    await frontend.admin.ResumeGeneration(admin_pb2.ResumeGenerationRequest())
    assert script.pause_mode is None
