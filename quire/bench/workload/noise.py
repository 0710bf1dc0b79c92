"""Pictures and clips of sound in the requests of a workload: random noise from fixed seeds."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from dataclasses import dataclass, replace

import numpy as np

from quire.shared.pb.inference.v1 import inference_pb2 as pb

PNG = b"\x89PNG\r\n\x1a\n"
EIGHT_BIT_RGB = (8, 2, 0, 0, 0)
RATE = 16_000  # samples per second
LOUDNESS = 0.1  # standard deviation of samples; 1 is the loudest value of a file
SEEDS_OF_A_RUN = 1_000_000  # between the seeds of two runs


@dataclass(frozen=True, slots=True)
class NoiseMedia:
    """Number and size of the pictures of one request, or the length of its clip."""

    seed: int
    pictures: int = 0
    width: int = 0  # pixels
    height: int = 0
    clip_s: int = 0  # 0: no clip

    def in_run(self, number: int) -> NoiseMedia:
        """Returns media of the same sizes with other contents for each run."""
        return replace(self, seed=self.seed + SEEDS_OF_A_RUN * number)

    def add_to(self, request: pb.GenerateRequest) -> None:
        """Adds the media to a request, as files in memory."""
        draw = np.random.default_rng(self.seed)
        shape = (self.height, self.width, 3)
        for _ in range(self.pictures):
            request.images.append(pb.MediaPart(content=png(draw.integers(0, 256, shape, dtype=np.uint8))))
        if self.clip_s:
            request.audios.append(pb.MediaPart(content=_wav(draw.standard_normal(RATE * self.clip_s) * LOUDNESS)))


def _wav(samples: np.ndarray[tuple[int], np.dtype[np.float64]]) -> bytes:
    """Returns samples from -1 to 1 as a WAV file with one channel of 16 bits."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes())
    return stream.getvalue()


def png(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Returns an 8-bit RGB picture [height, width, 3] as a PNG file."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each row begins with its filter, 0: none
    rows[:, 1:] = pixels.reshape(height, -1)
    head = struct.pack(">II5B", width, height, *EIGHT_BIT_RGB)
    return PNG + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 1)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
