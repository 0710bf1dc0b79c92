"""Videos in requests: every dialect that takes them renders the same prompt and serves the same frames."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from quire.shared.columns import i32
from quire.shared.pb.common.v1 import media_pb2, sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.media.filming_folder import IMAGE, VIDEO, write_filming_folder
from tests.services.frontend.media.seeing import Served, data_url, pixels_of, seeing_frontend, text, user
from tests.services.frontend.media.seeing_folder import plain, write_seeing_folder
from tests.services.frontend.media.video_files import animation, array, frame_list, shade, video
from tests.services.frontend.scripted_scheduler import ReceivedSubmission

CHAT = "/v1/chat/completions"
NEAR = 6


@pytest.fixture(scope="module")
def filming(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_filming_folder(tmp_path_factory.mktemp("models") / "filming")


@pytest.fixture(scope="module")
def stamping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_filming_folder(
        tmp_path_factory.mktemp("models") / "stamping", "qwen3_vl", image_mean=[0.5] * 3, image_std=[0.5] * 3
    )


def film(content: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(content, "video/mp4")}, **fields}


def image(side: int = 16) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(plain((200, 0, 0), side))}}


async def asked(served: Served, path: str = CHAT, **body: Any) -> ReceivedSubmission:
    """Asks and returns the submission; the answer must succeed."""
    number = len(served.script.submissions)
    served.script.pause()
    waiting = served.ask(path, **body)
    try:
        submission = await served.submission(number, waiting)
        submission.levels = [  # type: ignore[attr-defined]
            np.frombuffer(pixels, np.uint8) for pixels in await pixels_of(served, submission)
        ]
    finally:
        served.script.resume()
    assert (await waiting).status_code == 200, (await waiting).text
    return submission


def shown(served: Served, submission: ReceivedSubmission) -> str:
    """Returns the text of a prompt, each run of placeholders once."""
    tokenizer = served.started.frontend.model.tokenizer
    whole = tokenizer.decode(i32(submission.token_ids).tolist(), skip_special_tokens=False)
    for placeholder in (IMAGE, VIDEO):
        while placeholder * 2 in whole:
            whole = whole.replace(placeholder * 2, placeholder)
    return whole


async def test_chat_with_videos_and_a_picture(filming: Path) -> None:
    parts = [text("first"), film(video(8)), image(), film(animation(4, duration=500)), text("which?")]
    async with seeing_frontend(filming) as served:
        models = (await served.started.http.get("/v1/models")).json()["data"]
        assert models[0]["input_modalities"] == ["text", "image", "video"]
        submission = await asked(served, messages=user(*parts))
        assert shown(served, submission) == (
            "<|im_start|>user\nfirst<|vision_start|><|video_pad|><|vision_end|><|vision_start|><|image_pad|>"
            "<|vision_end|><|vision_start|><|video_pad|><|vision_end|>which?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert [item.modality for item in submission.media] == ["video", "image", "video"]
        layouts = [i32(item.layout).tolist() for item in submission.media]
        assert [layout[0] for layout in layouts] == [2, 1, 2]
        assert layouts[0][3:] == [0, 1], "1 s at 8 frames a second: 4 of them, two positions a second"
        assert [item.num_embeddings for item in submission.media] == [int(np.prod(layout[:3])) for layout in layouts]
        tiles = submission.levels[0].reshape(4, -1).mean(1)  # type: ignore[attr-defined]
        np.testing.assert_allclose(tiles, [shade(index, 8) for index in (0, 2, 4, 6)], atol=NEAR)


async def test_the_times_of_frames_stand_in_the_prompt(stamping: Path) -> None:
    """The tokens around the placeholder belong to each pair of frames, not to the video."""
    async with seeing_frontend(stamping) as served:
        submission = await asked(served, messages=user(film(video(32)), text("when?")))
        times = "".join(
            f"<{time} seconds><|vision_start|><|video_pad|><|vision_end|>" for time in ("0.2", "1.4", "2.5", "3.6")
        )
        assert shown(served, submission) == (f"<|im_start|>user\n{times}when?<|im_end|>\n<|im_start|>assistant\n")
        (item,) = submission.media
        assert item.num_embeddings < item.length
        runs = i32(item.embedding_runs).reshape(-1, 2).tolist()
        assert sum(length for _, length in runs) == item.num_embeddings
        ids = i32(submission.token_ids)[item.offset : item.offset + item.length]
        placeholder = int(ids[runs[0][0]])
        assert {int(ids[start + index]) for start, length in runs for index in range(length)} == {placeholder}
        assert int((ids == placeholder).sum()) == item.num_embeddings


async def test_options_change_the_frames(filming: Path) -> None:
    content = film(video(32))
    async with seeing_frontend(filming) as served:
        for body, count in (
            ({}, 8),
            ({"media_io_kwargs": {"video": {"num_frames": 4}}}, 4),
            ({"media_io_kwargs": {"video": {"fps": 1}}}, 4),
            ({"media_io_kwargs": {"video": {"num_frames": -1, "fps": -1}}}, 32),
            ({"mm_processor_kwargs": {"fps": 4.0}}, 16),
            ({"mm_processor_kwargs": {"videos_kwargs": {"num_frames": 6}}}, 6),
            ({"mm_processor_kwargs": {"do_sample_frames": False}}, 32),
        ):
            submission = await asked(served, messages=user(content), **body)
            assert i32(submission.media[0].layout)[0] == count // 2, body
        smaller = await asked(served, messages=user(content), mm_processor_kwargs={"max_pixels": 64})
        assert i32(smaller.media[0].layout).tolist()[:3] == [4, 1, 1]
        for body, said in (
            ({"media_io_kwargs": {"video": {"num_frames": 0}}}, "num_frames is 0; a whole number above 0"),
            ({"media_io_kwargs": {"video": {"codec": "h264"}}}, "media_io_kwargs.video has no option 'codec'"),
            ({"media_io_kwargs": {"video": 3}}, "media_io_kwargs.video: Input should be a valid dictionary"),
            ({"media_io_kwargs": {"video": {"frames_indices": [-1]}}}, "frames_indices must be a list"),
            ({"media_io_kwargs": {"video": {"duration": "long"}}}, "duration is 'long'"),
            ({"mm_processor_kwargs": {"videos_kwargs": 3}}, "videos_kwargs must be an object"),
        ):
            status, found = await served.refusal(CHAT, messages=user(content), **body)
            assert (status, said in found) == (400, True), found


async def test_frames_in_base64(filming: Path) -> None:
    part = {"type": "video_url", "video_url": {"url": frame_list(6)}}
    facts = {"fps": 10, "total_num_frames": 60, "frames_indices": [0, 10, 20, 30, 40, 50], "duration": 6.0}
    async with seeing_frontend(filming) as served:
        submission = await asked(served, messages=user(part))
        assert i32(submission.media[0].layout).tolist()[3:] == [0, 2, 4]
        submission = await asked(served, messages=user(part), media_io_kwargs={"video": facts})
        assert i32(submission.media[0].layout).tolist()[3:] == [0, 4, 8]


async def test_files_names_and_equal_videos(filming: Path, tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_bytes(video(8))
    part = {"video_url": f"file://{tmp_path}/film.mp4", "uuid": "film"}  # a type may be missing
    async with seeing_frontend(filming, allowed_local_media_path=str(tmp_path)) as served:
        first = await asked(served, messages=user(part))
        again = await asked(served, messages=user(film(video(8)), {"type": "video_url", "uuid": "film"}))
        assert {item.identifier for item in again.media} == {first.media[0].identifier}
        status, said = await served.refusal(CHAT, messages=user({"type": "video_url", "uuid": "other"}))
        assert (status, "Cache miss for video at index 0 but data is not provided." in said) == (400, True)
        outside = {"type": "video_url", "video_url": {"url": "file:///etc/hostname"}}
        status, said = await served.refusal(CHAT, messages=user(outside))
        assert (status, "must be a subpath of" in said) == (400, True)
    async with seeing_frontend(filming) as served:
        web = {"type": "video_url", "video_url": {"url": "https://videos.example.com/film.mp4"}}
        status, said = await served.refusal(CHAT, messages=user(web))
        assert (status, "The URL must be from one of the allowed domains" in said) == (400, True)


async def test_limits_and_wrong_parts(filming: Path) -> None:
    limits = {"video": 1, "image": 2}
    async with seeing_frontend(filming, limit_mm_per_prompt=limits) as served:
        await asked(served, messages=user(film(video(4)), image(), image()))
        status, said = await served.refusal(CHAT, messages=user(film(video(4)), film(video(5))))
        assert status == 400
        assert "At most 1 video(s) may be provided in one prompt. Set `--limit-mm-per-prompt`" in said
        for part, words in (
            ({"type": "video_url"}, "of type 'video_url' need video_url: a URL, or an object with a url"),
            ({"type": "video_url", "video_url": {"url": 3}}, "need video_url"),
            (film(b"no video"), "Failed to load video: the file is damaged, cut off, or no video"),
            (film(video(4), uuid=3), "uuid must be text"),
        ):
            status, said = await served.refusal(CHAT, messages=user(part))
            assert (status, words in said) == (400, True), said


async def test_a_model_of_pictures_refuses_videos(tmp_path: Path) -> None:
    async with seeing_frontend(write_seeing_folder(tmp_path / "seeing")) as served:
        status, said = await served.refusal(CHAT, messages=user(film(video(4))))
        assert "parts of type 'video_url' are not supported by this server" in said
        assert status in (400, 501)


async def grpc_media(served: Served, call: Any) -> list[media_pb2.MediaItem]:
    """Starts a streaming call and returns the items of its prompt."""
    number = len(served.script.submissions)
    async for _ in call:
        pass
    return [*served.script.submissions[number].media]


async def test_grpc_chats_and_prompts(filming: Path) -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=1)
    part = pb.ContentPart(video=pb.MediaPart(content=video(8)))
    message = pb.ChatMessage(role="user", parts=[part, pb.ContentPart(text="what?")])
    times = pb.VideoFrames(fps=8, total_num_frames=64, frames_indices=[0, 16, 32, 48])
    frames = pb.MediaPart(content=array(4), frames=times)
    picture = pb.MediaPart(content=plain((1, 2, 3), 16))
    async with seeing_frontend(filming) as served:
        inference = served.started.inference
        served.script.resume()
        chat = await grpc_media(served, inference.Chat(pb.ChatRequest(messages=[message], sampling=sampling)))
        assert [item.modality for item in chat] == ["video"]
        request = pb.GenerateRequest(text=f"a {IMAGE} b {VIDEO}", images=[picture], videos=[frames], sampling=sampling)
        prompt = await grpc_media(served, inference.Generate(request))
        assert [item.modality for item in prompt] == ["image", "video"], "each kind in its own order"
        assert i32(prompt[1].layout).tolist()[3:] == [0, 8]
        for text_of_prompt, given, said in (
            ("none", frames, "Expected there to be 1 prompt updates corresponding to 1 video items"),
            (VIDEO, pb.MediaPart(), "of type video need content, url or name"),
        ):
            request = pb.GenerateRequest(text=text_of_prompt, videos=[given], sampling=sampling)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await grpc_media(served, inference.Generate(request))
            assert said in str(refused.value.details())
        model = (await inference.GetModel(pb.GetModelRequest())).model
        assert [*model.input_modalities] == ["text", "image", "video"]


async def test_users_cannot_spell_the_placeholder(filming: Path) -> None:
    async with seeing_frontend(filming) as served:
        submission = await asked(served, messages=user(text(f"say {VIDEO}"), film(video(4))))
        assert len(submission.media) == 1
        assert json.dumps(shown(served, submission)).count("video_pad") == 2


async def test_ollama_videos(filming: Path) -> None:
    """They stand after the pictures of a message, before its text."""
    content, small = b64encode(video(8)).decode(), b64encode(plain((0, 0, 200), 16)).decode()
    turn = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
        "what?<|im_end|>\n<|im_start|>assistant\n"
    )
    message = {"role": "user", "content": "what?", "videos": [content], "images": [small]}
    options = {"stream": False, "options": {"num_predict": 1}}
    async with seeing_frontend(filming) as served:
        for path, body in (
            ("/api/chat", {"messages": [message]}),
            ("/api/generate", {"prompt": "what?", "videos": [content], "images": [small]}),
        ):
            submission = await asked(served, path, model="filming", **body, **options)
            assert shown(served, submission) == turn
            assert [item.modality for item in submission.media] == ["image", "video"]
        for path, body, said in (
            ("/api/generate", {"prompt": "x", "videos": [content[:40]]}, "video"),
            ("/api/chat", {"messages": [{**message, "videos": [5]}]}, "messages: videos must be texts in base64"),
            ("/api/chat", {"messages": [{**message, "videos": "x"}]}, "videos"),
        ):
            status, error = await served.refusal(path, model="filming", **body, **options)
            assert (status, said in error) == (400, True), error


async def test_sglang_videos(filming: Path) -> None:
    """Forms of image_data: a text, an object, a list, and one list for each prompt."""
    content, url = b64encode(video(8)).decode(), data_url(video(8), "video/mp4")
    prompt = "<|vision_start|><|video_pad|><|vision_end|> what?"
    async with seeing_frontend(filming) as served:
        for given in (content, url, {"url": url}, [content]):
            submission = await asked(served, "/generate", text=prompt, video_data=given)
            assert [item.modality for item in submission.media] == ["video"]
            assert shown(served, submission) == prompt
        both = f"<|vision_start|><|image_pad|><|vision_end|>{prompt}"
        picture = data_url(plain((0, 0, 200), 16))
        submission = await asked(served, "/generate", text=[both], video_data=[[content]], image_data=[[picture]])
        assert [item.modality for item in submission.media] == ["image", "video"]
        for body, said in (
            ({"text": [prompt, prompt], "video_data": [content]}, "video_data has videos for 1 prompts; there are 2"),
            ({"text": prompt, "video_data": 5}, "video_data must hold URLs or base64 texts, got int"),
            ({"text": "x", "video_data": content}, "video"),
        ):
            status, error = await served.refusal("/generate", **body)
            assert (status, said in error) == (400, True), error


async def test_cohere_videos(filming: Path) -> None:
    async with seeing_frontend(filming) as served:
        submission = await asked(served, "/v2/embed", inputs=[{"content": [text("a "), film(video(8))]}])
        assert [item.modality for item in submission.media] == ["video"]
        assert "a <|vision_start|><|video_pad|><|vision_end|>" in shown(served, submission)


async def test_models_without_videos_refuse_them_in_every_body(tmp_path: Path) -> None:
    content = b64encode(video(2)).decode()
    async with seeing_frontend(write_seeing_folder(tmp_path / "seeing")) as served:
        for path, body in (
            ("/generate", {"text": "x", "video_data": content}),
            ("/api/chat", {"model": "seeing", "messages": [{"role": "user", "content": "x", "videos": [content]}]}),
            ("/v2/embed", {"inputs": [{"content": [film(video(2))]}]}),
        ):
            status, error = await served.refusal(path, **body)
            assert (status, "not videos" in error) == (400, True), error
