"""Pictures of Python programs reach the model's processor as the same files would."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.async_client import AsyncClient
from quire.params import SamplingParams
from quire.pictures import media_part
from quire.shared.errors import InvalidArgument
from tests.services.frontend.media.seeing import Served, data_url, pixels_of, seeing_frontend, shown_prompt
from tests.services.frontend.media.seeing_folder import SIDE, plain, png, write_seeing_folder

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
ORIENTATION = 0x0112  # tag of EXIF
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_folder(tmp_path_factory.mktemp("models") / "seeing")


async def sent(served: Served, asking: Any) -> tuple[str, list[bytes]]:
    """Returns prompt and pixels of the next submission, and lets the call finish."""
    number = len(served.script.submissions)
    served.script.pause()
    task = asyncio.ensure_future(asking)
    submission = await served.submission(number)
    found = shown_prompt(served, submission), await pixels_of(served, submission)
    served.script.resume()
    await task
    return found


async def test_generate_takes_what_users_of_vllm_have(seeing: Path, tmp_path: Path) -> None:
    (tmp_path / "green.png").write_bytes(plain(GREEN))
    red = Image.new("RGB", (SIDE, SIDE), RED)
    half = np.zeros((SIDE, SIDE, 3), np.float32) + np.array([0.0, 0.0, 1.0], np.float32)
    kinds: list[tuple[Any, tuple[int, int, int]]] = [
        (red, RED),
        (np.asarray(red), RED),
        (np.asarray(red).transpose(2, 0, 1), RED),
        (half, BLUE),
        (tmp_path / "green.png", GREEN),
        (str(tmp_path / "green.png"), GREEN),
        (data_url(plain(GREEN)), GREEN),
        (plain(BLUE), BLUE),
        (red.convert("CMYK"), RED),
    ]
    async with seeing_frontend(seeing) as served, AsyncClient(served.started.frontend.grpc_address) as client:
        for picture, colour in kinds:
            prompt = {"prompt": "USER: <image>\nwhat? ASSISTANT:", "multi_modal_data": {"image": picture}}
            shown, (pixels,) = await sent(served, client.generate(prompt, ONE))
            assert shown == "USER: [picture]\nwhat? ASSISTANT:"
            assert np.abs(np.frombuffer(pixels[:3], np.uint8).astype(int) - colour).max() <= 1, type(picture)
        several = {"prompt": "<image><image>", "multi_modal_data": {"image": [red, tmp_path / "green.png"]}}
        shown, pixels_of_both = await sent(served, client.generate(several, ONE))
        assert (shown, [p[:3] for p in pixels_of_both]) == ("[picture]" * 2, [bytes(RED), bytes(GREEN)])
        named = {"prompt": "<image>", "multi_modal_data": {"image": red}, "multi_modal_uuids": {"image": ["a"]}}
        await sent(served, client.generate(named, ONE))
        again = {"prompt": "<image>", "multi_modal_uuids": {"image": ["a"]}}
        _, (pixels,) = await sent(served, client.generate(again, ONE))
        assert pixels[:3] == bytes(RED)
        with pytest.raises(InvalidArgument, match=r"mm_processor_kwargs\.size"):
            await client.generate({**several, "mm_processor_kwargs": {"size": 4}}, ONE)
        with pytest.raises(InvalidArgument, match="Expected there to be 1 prompt updates"):
            await client.generate({"prompt": "no placeholder", "multi_modal_data": {"image": red}}, ONE)


async def test_an_image_object_is_shown_as_its_file_would_be(seeing: Path) -> None:
    """Orientation and transparency of images that were opened by the program, vllm#47566."""
    turned = Image.new("RGB", (SIDE, SIDE), BLUE)
    turned.paste(RED, (0, 0, SIDE // 2, SIDE))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    file = png(turned, "JPEG", quality=100, exif=exif.tobytes())
    clear = png(Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 0)))
    palette = png(turned.convert("P", palette=Image.Palette.ADAPTIVE))
    async with seeing_frontend(seeing) as served, AsyncClient(served.started.frontend.grpc_address) as client:
        for content in (file, clear, palette):
            opened = Image.open(io.BytesIO(content))
            both = {"prompt": "<image><image>", "multi_modal_data": {"image": [content, opened]}}
            _, (by_file, by_object) = await sent(served, client.generate(both, ONE))
            assert by_file == by_object


async def test_chat_takes_parts_of_openai_and_image_objects(seeing: Path) -> None:
    red = Image.new("RGB", (SIDE, SIDE), RED)
    content = [
        {"type": "text", "text": "see "},
        {"type": "image_pil", "image_pil": red},
        {"type": "image", "image": red},
        {"type": "image_url", "image_url": {"url": data_url(plain(GREEN))}},
        "!",
    ]
    async with seeing_frontend(seeing) as served, AsyncClient(served.started.frontend.grpc_address) as client:
        shown, pixels = await sent(served, client.chat([{"role": "user", "content": content}], ONE))
        assert shown == "<|im_start|>user\nsee [picture][picture][picture]!<|im_end|>\n<|im_start|>assistant\n"
        assert [p[:3] for p in pixels] == [bytes(RED), bytes(RED), bytes(GREEN)]
        with pytest.raises(InvalidArgument, match="parts of type 'file' are not supported"):
            await client.chat([{"role": "user", "content": [{"type": "file"}]}], ONE)


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        (5, "a picture must be an image of Pillow, an array, a path, a URL or bytes, got int"),
        (np.zeros((6, 6, 5), np.uint8), r"an array of shape \(6, 6, 5\) and type uint8 is not a picture"),
        (np.zeros((4, 4, 3), np.int64), "type int64 is not a picture"),
        (np.full((4, 4, 3), 200.0), "floating point from 0 to 1"),
        ("/no/such/file.png", "cannot read '/no/such/file.png': No such file"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_picture_is_named(picture: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        media_part(picture)
