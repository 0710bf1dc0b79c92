"""Small videos whose frames differ in brightness, in several formats."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

SIDE = 64
BRIGHTEST = 255


def shade(index: int, count: int) -> int:
    """Returns the brightness of frame `index` of `count`: dark at first, bright at last."""
    return round(20 + 215 * index / max(count - 1, 1))


def frame(index: int, count: int, height: int = SIDE, width: int = SIDE) -> Image.Image:
    return Image.new("RGB", (width, height), (shade(index, count),) * 3)


def video(
    count: int = 16,
    *,
    fps: float | Fraction = 8,
    codec: str = "mpeg4",
    form: str = "mp4",
    size: tuple[int, int] = (SIDE, SIDE),
    times: Sequence[int] | None = None,
    path: Path | None = None,
    g: str = "12",
    **options: str,
) -> bytes:
    """Returns the file of a video of `count` frames of `size` (height, width). `times`: of the frames, in 1/1000 s, in
    place of a fixed rate; `path`: where the file is written, for muxers that read it again; `g`: distance of the frames
    that need no other."""
    av = pytest.importorskip("av")
    stream = io.BytesIO()
    with av.open(str(path) if path else stream, "w", format=form, options=options) as container:
        rate = Fraction(fps).limit_denominator(100_000)
        output = container.add_stream(codec, rate=rate, options={"g": g})
        output.height, output.width = size
        output.pix_fmt = "yuv420p"
        if times is not None:
            output.codec_context.time_base = Fraction(1, 1000)
        for index in range(count):
            shown = av.VideoFrame.from_image(frame(index, count, *size))
            if times is not None:
                shown.pts, shown.time_base = times[index], Fraction(1, 1000)
            container.mux(output.encode(shown))
        container.mux(output.encode())
    return path.read_bytes() if path else stream.getvalue()


def sound(form: str = "mp4") -> bytes:
    """Returns a file with sound and no video."""
    av = pytest.importorskip("av")
    stream = io.BytesIO()
    with av.open(stream, "w", format=form) as container:
        output = container.add_stream("aac", rate=16_000)
        output.layout = "mono"
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        samples.sample_rate = 16_000
        container.mux(output.encode(samples))
        container.mux(output.encode())
    return stream.getvalue()


def animation(count: int = 6, *, kind: str = "GIF", duration: int = 200, **options: Any) -> bytes:
    """Returns an animated picture. `duration`: of each frame, in milliseconds."""
    first, *others = [frame(index, count) for index in range(count)]
    stream = io.BytesIO()
    first.save(stream, kind, save_all=True, append_images=others, duration=duration, **options)
    return stream.getvalue()


def frame_list(count: int = 4, kind: str = "JPEG") -> str:
    """Returns a data: URL with frames as pictures in base64, joined by commas, as vLLM takes them."""
    parts = []
    for index in range(count):
        stream = io.BytesIO()
        frame(index, count).save(stream, kind)
        parts.append(base64.b64encode(stream.getvalue()).decode())
    return "data:video/jpeg;base64," + ",".join(parts)


def array(count: int = 4) -> bytes:
    """Returns frames as a .npy file."""
    stream = io.BytesIO()
    np.save(stream, np.stack([np.asarray(frame(index, count)) for index in range(count)]))
    return stream.getvalue()
