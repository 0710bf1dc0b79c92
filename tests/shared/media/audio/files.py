"""Sound files made in memory."""

from __future__ import annotations

import io
import struct
import wave

import numpy as np


def tone(hertz: float, seconds: float, rate: int, level: float = 0.5) -> np.ndarray:
    """Returns a sine, float32 [num_samples]."""
    return (level * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def noise(num_samples: int, seed: int = 0, level: float = 0.1) -> np.ndarray:
    return (level * np.random.default_rng(seed).standard_normal(num_samples)).astype(np.float32)


def wav(samples: np.ndarray, rate: int, bits: int = 16) -> bytes:
    """Returns a PCM WAV file written by the standard library. `samples`: [num_samples] or [num_samples, channels]."""
    columns = samples[:, None] if samples.ndim == 1 else samples
    whole = np.clip(np.round(columns * ((1 << (bits - 1)) - 1)), -(1 << (bits - 1)), (1 << (bits - 1)) - 1).astype(
        "<i4"
    )
    if bits == 8:
        data = (whole + 128).astype(np.uint8).tobytes()
    else:
        data = whole.reshape(-1, 1).view(np.uint8)[:, : bits // 8].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(columns.shape[1])
        writer.setsampwidth(bits // 8)
        writer.setframerate(rate)
        writer.writeframes(data)
    return file.getvalue()


def coded_wav(coding: int, bits: int, data: bytes, rate: int = 8000, channels: int = 1) -> bytes:
    """Returns a WAV file with a header of this coding."""
    frame = channels * bits // 8
    form = struct.pack("<HHIIHH", coding, channels, rate, rate * frame, frame, bits)
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def encoded(samples: np.ndarray, rate: int, container: str, codec: str) -> bytes:
    """Returns a file written by PyAV, [num_samples] or [num_samples, channels]."""
    import av

    columns = samples.reshape(len(samples), -1)
    file = io.BytesIO()
    with av.open(file, "w", format=container) as writer:
        layout = "mono" if columns.shape[1] == 1 else "stereo"
        stream = writer.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(columns.T), format="fltp", layout=layout)
        frame.sample_rate = rate
        resampler = av.AudioResampler(
            stream.codec_context.format, layout, rate, stream.codec_context.frame_size or None
        )
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            writer.mux(stream.encode(part))
        writer.mux(stream.encode(None))
    return file.getvalue()
