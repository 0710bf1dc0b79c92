"""All modalities of Python programs become messages by one table: prompts' dictionaries and parts of chats."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.media import add_media, content_parts
from quire.shared.errors import InvalidArgument
from quire.shared.pb.inference.v1 import inference_pb2 as pb

PICTURE = np.zeros((4, 4, 3), np.uint8)
FRAMES = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
CLIP = np.zeros(64, np.float32)


def added(data: Any, uuids: Any = None) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    add_media(request, data, uuids)
    return request


def frames_of(part: pb.MediaPart) -> Any:
    return np.load(io.BytesIO(part.content))


def test_each_modality_has_its_field() -> None:
    request = added({"audio": (CLIP, 16_000), "video": FRAMES, "image": [PICTURE, "https://h/a.png"]})
    assert [part.WhichOneof("source") for part in request.images] == ["content", "url"]
    assert [part.content[:6] for part in request.videos] == [b"\x93NUMPY"]
    assert [part.content[:4] for part in request.audios] == [b"RIFF"]
    assert added(None) == added({}) == pb.GenerateRequest()


@pytest.mark.parametrize(("modality", "item"), [("image", PICTURE), ("video", FRAMES), ("audio", CLIP)])
def test_names_go_with_items_or_stand_alone(modality: str, item: Any) -> None:
    request = added({modality: [item, item]}, {modality: ["a", "b"]})
    assert [part.name for part in getattr(request, f"{modality}s")] == ["a", "b"]
    (alone,) = getattr(added(None, {modality: "a"}), f"{modality}s")
    assert (alone.name, alone.WhichOneof("source")) == ("a", None)
    with pytest.raises(InvalidArgument, match=f"multi_modal_uuids has 1 names for 2 {modality} items"):
        added({modality: [item, item]}, {modality: ["a"]})


@pytest.mark.parametrize("field", ["multi_modal_data", "multi_modal_uuids"])
def test_an_unknown_modality_is_named(field: str) -> None:
    given = [{"depth": 1}, None] if field == "multi_modal_data" else [None, {"depth": 1}]
    with pytest.raises(InvalidArgument, match=f"{field}: 'depth' is not supported; available: image, video, audio"):
        added(*given)


@pytest.mark.parametrize(
    ("part", "modality"),
    [
        ({"type": "image_url", "image_url": {"url": "https://h/a"}}, "image"),
        ({"type": "input_image", "image_url": "https://h/a"}, "image"),
        ({"image_url": {"url": "https://h/a"}}, "image"),
        ({"type": "image", "image": "https://h/a"}, "image"),
        ({"type": "video_url", "video_url": {"url": "https://h/a"}}, "video"),
        ({"type": "video", "video": "https://h/a"}, "video"),
        ({"video_url": "https://h/a"}, "video"),
        ({"type": "audio_url", "audio_url": {"url": "https://h/a"}}, "audio"),
        ({"type": "audio", "audio": "https://h/a"}, "audio"),
        ({"audio_url": "https://h/a"}, "audio"),
    ],
)
def test_parts_of_messages(part: dict[str, Any], modality: str) -> None:
    (found,) = content_parts([{**part, "uuid": "a"}])
    assert found.WhichOneof("part") == modality
    assert (getattr(found, modality).url, getattr(found, modality).name) == ("https://h/a", "a")


def test_a_part_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'file' are not supported; send text, images, videos and audio"):
        content_parts([{"type": "file"}])


def test_forms_of_videos() -> None:
    pictures = [Image.fromarray(frame) for frame in FRAMES]
    for video in (FRAMES, FRAMES.transpose(0, 3, 1, 2), FRAMES / 255.0, pictures, [*FRAMES]):
        (part,) = added({"video": video}).videos
        np.testing.assert_array_equal(frames_of(part), FRAMES)
    assert len(added({"video": [FRAMES, pictures]}).videos) == 2
    (part,) = added({"video": (FRAMES, {"fps": 8, "total_num_frames": 9, "frames_indices": np.array([0, 8])})}).videos
    assert part.frames == pb.VideoFrames(fps=8, total_num_frames=9, frames_indices=[0, 8])
    np.testing.assert_array_equal(frames_of(part), FRAMES)


@pytest.mark.parametrize(
    ("video", "said"),
    [
        (5, "a video must be an array of frames.*got int"),
        ((FRAMES,), r"a tuple of 1; \(frames, metadata\) is needed"),
        ((FRAMES, 8), "with a dictionary as metadata"),
        ((FRAMES, {"fps": "fast"}), "with values that are no numbers"),
        (np.zeros((2, 4, 4, 5), np.uint8), r"shape \(2, 4, 4, 5\)"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)], "frames of different sizes"),
        ("/no/such/film.mp4", "cannot read '/no/such/film.mp4'"),
    ],
)
def test_what_is_no_video_is_named(video: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        added({"video": video})
