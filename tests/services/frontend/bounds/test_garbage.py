"""Memory of a refused request is released at once, not at the next garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import grpc
import pytest

from quire import bundled
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

LONG = "a" * 40_000  # one word, tokenized as a whole: more tokens than the context length
MANY = 5_000


@pytest.fixture(autouse=True)
def no_search() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_long_lists() -> int:
    return sum(type(found) is list and len(found) > MANY for found in gc.get_objects())


async def over_http(frontend: Running, path: str, name: str) -> None:
    messages = [{"role": "user", "content": LONG}]
    body = {"messages": messages} if name == "messages" else {name: LONG}
    if path == "/v1/messages":
        body |= {"model": frontend.frontend.core.catalogue.name, "max_tokens": 3}  # type: ignore[dict-item]
    reply = await frontend.http.post(path, json=body)
    assert reply.status_code == 400
    assert "maximum context length" in reply.text


async def over_grpc(frontend: Running, path: str, _: str) -> None:
    message = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=LONG)])
    calls = {"Generate": lambda: frontend.inference.Generate(pb.GenerateRequest(text=LONG))}
    calls["Chat"] = lambda: frontend.inference.Chat(message)
    with pytest.raises(grpc.aio.AioRpcError, match="maximum context length"):
        async for _ in calls[path]():
            pass


@pytest.mark.parametrize(
    ("edge", "path", "field"),
    [
        (over_http, "/v1/completions", "prompt"),
        (over_http, "/v1/chat/completions", "messages"),
        (over_http, "/v1/responses", "input"),
        (over_http, "/v1/messages", "messages"),
        (over_grpc, "Generate", ""),
        (over_grpc, "Chat", ""),
    ],
)
async def test_a_refused_prompt_leaves_no_tokens_in_memory(edge: object, path: str, field: str) -> None:
    script = ScriptedScheduler(count_up, max_model_len=4096)
    async with scheduler(script), running(bundled.FOLDER, script.address) as frontend:
        await edge(frontend, path, field)  # type: ignore[operator]
        await frontend.until_idle()
        gc.collect()
        before = num_long_lists()
        for _ in range(8):
            await edge(frontend, path, field)  # type: ignore[operator]
        await frontend.until_idle()
        assert num_long_lists() - before <= 1
