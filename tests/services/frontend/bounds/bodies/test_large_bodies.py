"""Large bodies are checked in a child process, with the same errors as in the frontend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from json import JSONDecodeError
from typing import Any

import pytest
from google.protobuf.message import Message

from quire.services.frontend.bounds import messages, wire_scan
from quire.services.frontend.bounds.bodies import body_probe, json_body, json_scan
from quire.services.frontend.bounds.bodies import spool as spool_module
from quire.services.frontend.bounds.bodies.heavy_work import HEAVY_BYTES
from quire.services.frontend.bounds.bodies.large_bodies import LargeBodies
from quire.services.frontend.bounds.bodies.spool import Spool
from quire.services.frontend.bounds.prompts import PromptLimit
from quire.shared.errors import InvalidArgument
from quire.shared.pb.dialects import open_inference_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.settings.request_limits import RequestLimits
from tests.priorities import has_stepped_back
from tests.waiting import eventually, is_reaped

LIMITS = RequestLimits()
ROOM = PromptLimit(4096, 16)
FILLING = "x" * HEAVY_BYTES


@pytest.fixture
async def large() -> AsyncIterator[LargeBodies]:
    made = LargeBodies(LIMITS, lambda: ROOM)
    yield made
    made.close()


@pytest.fixture(scope="module")
def judge() -> Iterator[LargeBodies]:
    """One child process for all bodies, as in a frontend."""
    made = LargeBodies(LIMITS, lambda: ROOM)
    yield made
    made.close()


def spooled(body: bytes) -> Spool:
    spool = Spool()
    for start in range(0, len(body), 1000):
        spool.append(body[start : start + 1000])
    return spool


def complaint(error: Exception) -> tuple[Any, ...]:
    match error:
        case InvalidArgument():
            return error.message, error.field, error.reason
        case JSONDecodeError():
            return error.msg, error.pos
    raise error


def found_here(body: bytes) -> tuple[Any, ...] | None:
    try:
        for _ in json_scan.check(body, LIMITS):
            pass
        document = json_body.parse(body)
        json_body.check(document, body, LIMITS)
        json_body.check_prompt(document, ROOM)
    except (InvalidArgument, JSONDecodeError) as error:
        return complaint(error)
    return None


BODIES = {
    "fine": json.dumps({"prompt": "a", "user": FILLING}).encode(),
    "no JSON": b'{"prompt": "a", "user": "' + FILLING.encode() + b'", }',
    "cut off": b'{"prompt": "' + FILLING.encode(),
    "no UTF-8": b'{"prompt": "\xff' + FILLING.encode() + b'"}',
    "half of a pair": b'{"prompt": "\\ud83d", "user": "' + FILLING.encode() + b'"}',
    "a number of 70,000 digits": b'{"prompt": ' + b"1" * 70_000 + b"}",
    "nested deep": b'{"user": "' + FILLING.encode() + b'", "x": ' + b"[" * 300 + b"]" * 300 + b"}",
    "too many values": b'{"prompt": [' + b"1," * 300_000 + b"1]}",
    "too many messages": json.dumps({"messages": [{"role": "user", "content": "x"}] * 5000}).encode(),
    "too long a prompt": json.dumps({"prompt": FILLING + "x"}).encode(),
    "too many tokens": json.dumps({"prompt": [7] * 30_000}).encode(),
    "too many tokens to cut": json.dumps({"prompt": [7] * 30_000, "truncate_prompt_tokens": 9}).encode(),
    "too many tokens in one of two": json.dumps({"input_ids": [[1], [7] * 30_000]}).encode(),
    "one of two is too long": json.dumps({"prompt": ["a", FILLING + "x"]}).encode(),
    "too long a conversation": json.dumps({"messages": [{"role": "user", "content": "x" * 30_000}] * 3}).encode(),
    "too long in parts": json.dumps({"messages": [{"content": [{"type": "text", "text": "x" * 300}] * 300}]}).encode(),
    "a list": json.dumps([FILLING]).encode(),
}


@pytest.mark.parametrize("name", BODIES)
async def test_it_says_what_would_be_said_here(judge: LargeBodies, name: str) -> None:
    body = BODIES[name]
    with spooled(body) as spool:
        try:
            assert await judge.check(spool)
            found = None
        except (InvalidArgument, JSONDecodeError) as error:
            found = complaint(error)
        assert spool.take_all() == body
    assert found == found_here(body)
    assert (found is None) == (name in ("fine", "a list", "too many tokens to cut"))


def _check_here(message: Message) -> None:
    messages.check(message, LIMITS)
    messages.check_prompt(message, ROOM)


def inference_request(text: str, *, raw: bool = False) -> open_inference_pb2.ModelInferRequest:
    """A request of the open inference protocol."""
    whole = open_inference_pb2.ModelInferRequest(inputs=[{"name": "text_input", "datatype": "BYTES", "shape": [1]}])
    if raw:
        whole.raw_input_contents.append(len(text).to_bytes(4, "little") + text.encode())
    else:
        whole.inputs[0].contents.bytes_contents.append(text.encode())
    return whole


async def test_messages_of_grpc_clients_too(large: LargeBodies) -> None:
    for message in (
        pb.GenerateRequest(text=FILLING + "x"),
        pb.TokenizeRequest(text=FILLING + "x"),
        pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x" * 20_000)] * 4),
        pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x" * 20)] * 5000),
        inference_request(FILLING + "x"),
        inference_request(FILLING + "x", raw=True),
    ):
        data = message.SerializeToString()
        with pytest.raises(InvalidArgument) as here:
            _check_here(message)
        with spooled(data) as spool, pytest.raises(InvalidArgument) as there:
            await large.check(spool, message.DESCRIPTOR.full_name)
        assert complaint(there.value) == complaint(here.value)
    fine = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300] * 100_000)).SerializeToString()
    assert set(wire_scan.check(fine, pb.GenerateRequest.DESCRIPTOR, LIMITS)) <= {None}
    with spooled(fine) as spool:
        assert await large.check(spool, pb.GenerateRequest.DESCRIPTOR.full_name)
    with (
        spooled(b"\xff" * 2 * HEAVY_BYTES) as spool,
        pytest.raises(InvalidArgument, match="is not a quire"),
    ):
        await large.check(spool, pb.GenerateRequest.DESCRIPTOR.full_name)


async def test_small_bodies_are_not_asked_about(large: LargeBodies) -> None:
    with spooled(b"{") as spool:
        assert spool.path is None
        assert not await large.check(spool)
    assert large.pid is None


async def test_files_are_few_and_all_are_given_back(large: LargeBodies) -> None:
    """A client that sends hundreds of large bodies must not use up the descriptors for connections."""
    body, before = BODIES["fine"], Spool.num_files
    many = [spooled(body) for _ in range(spool_module.MAX_FILES + 3)]
    assert [spool.path is None for spool in many].count(True) == 3 + before
    assert not await large.check(many[-1]), "the frontend checks the body itself"
    assert many[-1].take_all() == many[0].take_all() == body
    for spool in many:
        spool.close()
    assert Spool.num_files == before

    with without_descriptors():
        spool = spooled(body)
    with spool:
        assert spool.path is None
        assert spool.take_all() == body


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    """Lets this process open no further file."""
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_of_a_client_that_has_left_nothing_is_said(large: LargeBodies) -> None:
    spool = spooled(BODIES["no JSON"])
    path = spool.path
    spool.close()
    assert path is not None
    question = body_probe.BodyCheck(path, HEAVY_BYTES + 1, True, body_probe.JSON, 0, 0)
    answer = body_probe.begin(json.dumps({}).encode())(question.encode())
    assert json.loads(answer)["kind"] == body_probe.UNREAD


async def test_a_process_that_was_killed_is_replaced_and_one_that_ends_leaves_the_work_here(
    large: LargeBodies,
) -> None:
    with spooled(BODIES["fine"]) as spool:
        assert await large.check(spool)
        first = large.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: is_reaped(first))
        assert await large.check(spool)
        second = large.pid
        assert second not in (None, first)
        assert not await large.check(spool, "NoMessage"), "the child fails and the frontend checks the body itself"
        assert await large.check(spool)


async def test_background_work_yields_to_client_calls(large: LargeBodies) -> None:
    with spooled(BODIES["fine"]) as spool:
        assert await large.check(spool)
    assert large.pid is not None
    assert has_stepped_back(large.pid)


async def test_a_body_of_a_disconnected_client_is_not_mistaken_for_the_next_one(
    large: LargeBodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process gets a file by its descriptor number, which another file reuses once it is closed."""
    left, other = (b'{"tokens": [' + b",".join([number] * 30_000) + b"]}" for number in (b"300", b"301"))
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(large.thread, large.child.start)
    assert large.pid is not None
    asked, ask = threading.Event(), large.child.ask

    def tell(message: bytes) -> bytes:
        asked.set()
        return ask(message)

    monkeypatch.setattr(large.child, "ask", tell)
    os.kill(large.pid, signal.SIGSTOP)
    with spooled(left) as spool:
        asking = asyncio.create_task(large.check(spool))
        assert await asyncio.to_thread(asked.wait, 60)
        asking.cancel()
        await asyncio.wait([asking])
    with spooled(other) as kept:
        os.kill(large.pid, signal.SIGCONT)
        await loop.run_in_executor(large.thread, int)  # behind the question
        assert kept.take_all() == other
