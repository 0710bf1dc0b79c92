"""Valid gRPC messages with one unusual field: the answer is an error with a reason, never an internal one."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status.rpc_status import from_call

from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO = pb.ChatMessage(role="user", content="hi")
SAMPLING: dict[str, Any] = {"max_tokens": 2}
GOOD: dict[str, Message] = {
    "Generate": pb.GenerateRequest(text="hi", sampling=SAMPLING),
    "Chat": pb.ChatRequest(messages=[HELLO], sampling=SAMPLING),
    "Tokenize": pb.TokenizeRequest(text="hi"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[70]),
    "GetModel": pb.GetModelRequest(),
}
TEXTS = ("", "\0", "x" * 3000, "\N{GRINNING FACE}" * 3000, "\ud7ff\ue000", "{", '{"a": "\\ud800"}', "nobody")
FLOATS = (0.0, -0.0, -1.0, 1e30, math.inf, -math.inf, math.nan)
BITS = {FieldDescriptor.TYPE_INT32: 31, FieldDescriptor.TYPE_INT64: 63}
BITS |= {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}
DEPTH = 4
Put = Callable[[Message], None]  # inserts the unusual value into a valid message


def odd_values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXTS
    if field.type == FieldDescriptor.TYPE_BYTES:
        return (b"", b"\xff" * 7)
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return FLOATS
    if field.type == FieldDescriptor.TYPE_BOOL:
        return (True,)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return (0, 1, 77)
    most = 2 ** BITS[field.type] - 1
    is_signed = field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64)
    return (0, 1, most, *((-1, ~most) if is_signed else ()))


def changes(kind: Any, depth: int = DEPTH) -> Iterator[tuple[str, Put]]:
    """Yields, by description, changes to one field of such messages or of a nested message."""
    for field in kind.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield f"{field.name}{{}}", lambda m, f=field: _put_entry(m, f)
        elif field.message_type is None:
            for value in odd_values(field):
                yield f"{field.name}={value!r:.20}", lambda m, f=field, v=value: _put(m, f, v)
        elif depth:
            yield f"{field.name}()", lambda m, f=field: _inside(m, f) and None
            for name, put in changes(field.message_type, depth - 1):
                yield f"{field.name}.{name}", lambda m, f=field, p=put: p(_inside(m, f))


def _put(message: Message, field: FieldDescriptor, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def _put_entry(message: Message, field: FieldDescriptor) -> None:
    key, value = (odd_values(part)[-1] for part in field.message_type.fields)
    getattr(message, field.name)[key] = value


def _inside(message: Message, field: FieldDescriptor) -> Message:
    if field.is_repeated:
        added: Message = getattr(message, field.name).add()
        return added
    inner: Message = getattr(message, field.name)
    inner.SetInParent()
    return inner


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tool_model_folder(tmp_path_factory.mktemp("models") / "talking")
    async with scheduler(ScriptedScheduler(count_up)) as script, running(folder, script.address) as started:
        yield started


async def outcome(frontend: Running, method: str, message: Message) -> tuple[grpc.StatusCode, list[str], str]:
    """Returns code, named fields and text of the answer."""
    call = getattr(frontend.inference, method)(message)
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        status, fields, bad = from_call(error), list[str](), error_details_pb2.BadRequest()
        for packed in status.details if status is not None else ():
            if packed.Unpack(bad):
                fields += [violation.field for violation in bad.field_violations]
        return error.code(), fields, error.details() or ""
    return grpc.StatusCode.OK, [], ""


@pytest.mark.parametrize("method", GOOD)
async def test_an_odd_field_is_taken_or_named(frontend: Running, method: str) -> None:
    wrong = []
    for name, put in changes(GOOD[method].DESCRIPTOR):
        message = type(GOOD[method])()
        message.CopyFrom(GOOD[method])
        put(message)
        code, fields, text = await outcome(frontend, method, message)
        is_refusal = code.name in ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED")
        if code is not grpc.StatusCode.OK and not (is_refusal and any(fields) and text):
            wrong.append((name, code.name, fields, text))
    assert wrong == []
    await frontend.until_idle()
