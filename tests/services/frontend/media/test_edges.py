"""Every dialect that takes pictures renders the same prompt and serves the same pixels."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.media.seeing import (
    Served,
    asked_prompt,
    data_url,
    image,
    pixels_of,
    seeing_frontend,
    shown_prompt,
    text,
    user,
)
from tests.services.frontend.media.seeing_folder import NUM_EMBEDDINGS, plain, write_seeing_folder
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
ANSWER = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_folder(tmp_path_factory.mktemp("models") / "seeing")


def b64(colour: tuple[int, int, int]) -> str:
    return base64.b64encode(plain(colour)).decode()


def turn(role: str, words: str) -> str:
    return f"<|im_start|>{role}\n{words}<|im_end|>\n"


def block(colour: tuple[int, int, int], **source: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(colour), **source}}


async def test_anthropic_blocks_in_messages(seeing: Path) -> None:
    content = [text("look "), block(RED), {"type": "image", "source": {"type": "url", "url": data_url(plain(BLUE))}}]
    async with seeing_frontend(seeing) as served:
        shown, colours = await asked_prompt(
            served, "/v1/messages", model="", messages=[{"role": "user", "content": content}]
        )
        assert shown == turn("user", "look [picture][picture]") + ANSWER
        assert colours == [bytes(RED), bytes(BLUE)]
        # the type that a client names may be wrong (claude-code#6300) or missing: the file decides
        for media_type in ("image/jpeg", None):
            _, colours = await asked_prompt(
                served,
                "/v1/messages",
                model="",
                messages=[{"role": "user", "content": [block(GREEN, media_type=media_type)]}],
            )
            assert colours == [bytes(GREEN)]
        for source in ({"type": "file", "file_id": "f"}, {"type": "base64"}, None):
            status, said = await served.refusal(
                "/v1/messages", model="", messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]
            )
            assert status == 400
            assert "messages[0].content: blocks of type 'image' are not supported without a source" in said


async def test_anthropic_results_move_their_pictures_to_a_message_after_all_results(seeing: Path) -> None:
    """Screenshots of agents' tools, two calls in one turn."""
    calls = [{"type": "tool_use", "id": f"t{number}", "name": "shot", "input": {}} for number in (1, 2)]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [text("first"), block(RED)]},
        {"type": "tool_result", "tool_use_id": "t2", "content": [block(GREEN)]},
        text("compare"),
    ]
    messages = [
        {"role": "user", "content": "shoot"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": results},
    ]
    async with seeing_frontend(seeing) as served:
        shown, colours = await asked_prompt(served, "/v1/messages", model="", messages=messages)
    assert shown.index("first") < shown.index("[picture][picture]") < shown.index("compare")
    assert shown.count("[picture]") == 2
    assert colours == [bytes(RED), bytes(GREEN)]


async def test_ollama_images_of_chats_and_prompts_come_before_the_text(seeing: Path) -> None:
    async with seeing_frontend(seeing) as served:
        chat = [{"role": "user", "content": "what?", "images": [b64(RED), data_url(plain(GREEN))]}]
        shown, colours = await asked_prompt(served, "/api/chat", messages=chat, stream=False)
        assert shown == turn("user", "[picture][picture]what?") + ANSWER
        assert colours == [bytes(RED), bytes(GREEN)]
        shown, colours = await asked_prompt(served, "/api/generate", prompt="what?", images=[b64(BLUE)], stream=False)
        assert (shown, colours) == (turn("user", "[picture]what?") + ANSWER, [bytes(BLUE)])
        shown, _ = await asked_prompt(
            served, "/api/generate", prompt="see <image>!", images=[b64(BLUE)], raw=True, stream=False
        )
        assert shown == "see [picture]!"
        status, said = await served.refusal("/api/chat", messages=[{"role": "user", "content": "x", "images": ["@@"]}])
        assert (status, "its base64 is invalid" in said) == (400, True)


async def test_sglang_image_data(seeing: Path) -> None:
    async with seeing_frontend(seeing) as served:
        given: list[tuple[Any, Any]] = [
            ("a <image> b", b64(RED)),
            ("a <image> b", [data_url(plain(RED))]),
            ("a <image> b", {"url": data_url(plain(RED)), "format": "png"}),
        ]
        for words, data in given:
            shown, colours = await asked_prompt(
                served, "/generate", text=words, image_data=data, sampling_params={"max_new_tokens": 1}
            )
            assert (shown, colours) == ("a [picture] b", [bytes(RED)])
        status, said = await served.refusal("/generate", text=["<image>", "b"], image_data=[b64(RED)])
        assert (status, "image_data has pictures for 1 prompts; there are 2" in said) == (400, True)


def picture(colour: tuple[int, int, int]) -> pb.MediaPart:
    return pb.MediaPart(content=plain(colour))


async def grpc_prompt(served: Served, call: Any) -> tuple[str, list[bytes]]:
    """Starts a streaming call, and returns the prompt and the first pixels of its pictures."""
    number = len(served.script.submissions)
    served.script.pause()
    reading = asyncio.ensure_future(_read_all(call))
    try:
        waiting = asyncio.ensure_future(served.script.until(lambda: len(served.script.submissions) > number))
        await asyncio.wait({waiting, reading}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            waiting.cancel()
            await reading
        submission = await served.submission(number)
        found = shown_prompt(served, submission), [pixels[:3] for pixels in await pixels_of(served, submission)]
    finally:
        served.script.resume()
    await reading
    return found


async def _read_all(call: Any) -> None:
    async for _ in call:
        pass


async def test_grpc_parts_of_messages_and_pictures_of_prompts(seeing: Path) -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=1)
    parts = [
        pb.ContentPart(text="see "),
        pb.ContentPart(image=picture(RED)),
        pb.ContentPart(image=pb.MediaPart(url=data_url(plain(GREEN)), name="second")),
    ]
    message = pb.ChatMessage(role="user", parts=parts)
    async with seeing_frontend(seeing) as served:
        inference = served.started.inference
        found = await grpc_prompt(served, inference.Chat(pb.ChatRequest(messages=[message], sampling=sampling)))
        assert found == (turn("user", "see [picture][picture]") + ANSWER, [bytes(RED), bytes(GREEN)])
        named = pb.ChatMessage(role="user", parts=[pb.ContentPart(image=pb.MediaPart(name="second"))])
        found = await grpc_prompt(served, inference.Chat(pb.ChatRequest(messages=[named], sampling=sampling)))
        assert found == (turn("user", "[picture]") + ANSWER, [bytes(GREEN)])
        generate = pb.GenerateRequest(
            text="<image> or <image>", images=[picture(RED), picture(BLUE)], sampling=sampling
        )
        assert await grpc_prompt(served, inference.Generate(generate)) == (
            "[picture] or [picture]",
            [bytes(RED), bytes(BLUE)],
        )
        token = served.started.frontend.model.tokenizer.token_id("<image>")
        by_ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[token]), images=[picture(RED)], sampling=sampling)
        assert await grpc_prompt(served, inference.Generate(by_ids)) == ("[picture]", [bytes(RED)])
        clear = pb.MediaOptions(io=json.dumps({"image": {"rgba_background_color": [9, 9, 9]}}))
        by_ids.media_options.CopyFrom(clear)
        await grpc_prompt(served, inference.Generate(by_ids))
        model = (await inference.GetModel(pb.GetModelRequest())).model
        assert [*model.input_modalities] == ["text", "image"]
        wrong: list[tuple[Any, str]] = [
            (
                inference.Generate(pb.GenerateRequest(text="none", images=[picture(RED)])),
                "Expected there to be 1 prompt",
            ),
            (
                inference.Generate(pb.GenerateRequest(text="<image> <image>", images=[picture(RED)])),
                "Found more '<image>'",
            ),
            (
                inference.Chat(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x", parts=parts)])),
                "not both",
            ),
            (
                inference.Chat(pb.ChatRequest(messages=[pb.ChatMessage(role="user", parts=[pb.ContentPart()])])),
                "must be set",
            ),
            (
                inference.Generate(pb.GenerateRequest(text="<image>", images=[pb.MediaPart()])),
                "need content, url or name",
            ),
            (
                inference.Generate(pb.GenerateRequest(text="x", media_options=pb.MediaOptions(processor="[]"))),
                "media_options.processor must be a JSON object",
            ),
        ]
        for call, said in wrong:
            with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
                await _read_all(call)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "", "max_tokens": 1, "messages": [{"role": "user", "content": [block(RED)]}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [b64(RED)]}]}),
        ("/api/generate", {"prompt": "x", "images": [b64(RED)]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}),
        ("/generate", {"text": "x", "image_data": b64(RED)}),
        ("/v1/chat/completions", {"messages": user(image(plain(RED)))}),
    ],
)
async def test_a_model_of_texts_says_so_in_every_dialect(path: str, body: dict[str, Any], folder: Path) -> None:
    async with scheduler(ScriptedScheduler()) as script, running(folder, script.address) as started:
        answered = await started.http.post(path, json=body)
    assert answered.status_code == 400
    assert "not supported by this server: models are given text only, not pictures" in answered.text


async def test_conversations_with_pictures_are_pooled(seeing: Path) -> None:
    """As vLLM's clients send them to embedding models that see."""
    messages = user(text("look "), image(plain(RED)), text("!"))
    async with seeing_frontend(seeing) as served:
        for path in ("/v1/embeddings", "/pooling"):
            shown, colours = await asked_prompt(served, path, messages=messages)
            assert (shown, colours) == (turn("user", "look [picture]!"), [bytes(RED)])
            shown, _ = await asked_prompt(served, path, messages=messages, add_generation_prompt=True)
            assert shown == turn("user", "look [picture]!") + ANSWER
        assert served.script.submissions[0].samples_nothing
        for body, said in (
            ({"messages": messages, "input": "x"}, "exactly one of input and messages must be given, got both"),
            ({}, "exactly one of input and messages must be given, got neither"),
            ({"messages": messages, "truncate_prompt_tokens": 3}, "a prompt with pictures is not cut"),
            ({"messages": messages, "mm_processor_kwargs": {"colour": 1}}, "this model's processor has no such option"),
            ({"messages": user({"type": "image_url"})}, "need image_url: a URL"),
            ({"messages": [{"role": "user", "content": 5}]}, "content must be text or a list of parts"),
        ):
            assert said in (await served.refusal("/v1/embeddings", **body))[1]
        assert served.store.held_bytes == 0


async def test_cohere_embeds_pictures_and_texts_with_pictures(seeing: Path) -> None:
    mixed = [{"content": [text("a "), image(plain(GREEN)), text(" b")]}, {"content": [text("a"), text("b")]}]
    async with seeing_frontend(seeing) as served:
        asked = served.ask("/v2/embed", images=[data_url(plain(RED)), data_url(plain(BLUE))])
        submissions = [await served.submission(number, asked) for number in (0, 1)]
        assert [shown_prompt(served, one) for one in submissions] == [turn("user", "[picture]")] * 2
        assert [(await pixels_of(served, one))[0][:3] for one in submissions] == [bytes(RED), bytes(BLUE)]
        served.script.resume()
        answer = (await asked).json()
        assert len(answer["embeddings"]["float"]) == 2
        assert answer["meta"]["billed_units"]["image_tokens"] == 2 * NUM_EMBEDDINGS
        served.script.pause()
        asked = served.ask("/v2/embed", inputs=mixed)
        submissions = [await served.submission(number, asked) for number in (2, 3)]
        assert [shown_prompt(served, one) for one in submissions] == [turn("user", "a [picture] b"), "a\nb"]


async def test_kserve_image_inputs(seeing: Path) -> None:
    def tensor(name: str, *values: Any) -> dict[str, Any]:
        return {"name": name, "datatype": "BYTES", "shape": [len(values)], "data": [*values]}

    path = "/v2/models/seeing"
    async with seeing_frontend(seeing) as served:
        inputs = [tensor("text_input", "a <image> b <image>"), tensor("image", b64(RED), data_url(plain(BLUE)))]
        shown, colours = await asked_prompt(served, f"{path}/infer", inputs=inputs)
        assert (shown, colours) == ("a [picture] b [picture]", [bytes(RED), bytes(BLUE)])
        shown, colours = await asked_prompt(served, f"{path}/generate", text_input="<image>?", image=b64(GREEN))
        assert (shown, colours) == ("[picture]?", [bytes(GREEN)])
        described = (await served.started.http.get(path)).json()["inputs"]
        assert {"name": "image", "datatype": "BYTES", "shape": [-1]} in described
        for image_input, said in (
            (tensor("image", 5), "image holds base64 or URLs as texts, got int"),
            (tensor("image", "@@"), "its base64 is invalid"),
            (tensor("image", b64(RED), b64(BLUE)), "Expected there to be 2"),
        ):
            status, found = await served.refusal(f"{path}/infer", inputs=[tensor("text_input", "<image>"), image_input])
            assert (status, said in found) == (400, True), found
