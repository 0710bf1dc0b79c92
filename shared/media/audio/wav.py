"""Reader of WAV files (RIFF, RF64) with linear PCM, floating-point, A-law or mu-law samples.

Sizes in headers are limits, not facts: programs that write to a pipe leave 0, 0x7FFFFFFF or 0xFFFFFFFF there, and files
are cut off; the samples that are there are taken.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.shared.media.audio.waveform import (
    AudioBounds,
    Waveform,
    check_format,
    check_length,
    mono,
    refused,
    require_samples,
)

if TYPE_CHECKING:
    from quire.shared.media.audio.waveform import F32

PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
HEAD_BYTES, CHUNK_HEAD_BYTES, FORMAT_BYTES = 12, 8, 16
MAX_CHUNKS = 1024  # before the samples
DEPTHS = {PCM: (8, 16, 24, 32), FLOAT: (32, 64), A_LAW: (8,), MU_LAW: (8,)}  # bits of a sample


class WavFormat(NamedTuple):
    """Contents of a `fmt ` chunk."""

    coding: int
    channels: int
    rate: int
    bits: int  # of a sample

    @property
    def is_read_here(self) -> bool:
        """Whether this module decodes the coding; the others need a codec."""
        return self.bits in DEPTHS.get(self.coding, ())


def is_wav(content: bytes) -> bool:
    """Returns whether a file begins as a WAV file."""
    return content[:4] in (b"RIFF", b"RF64") and content[8:12] == b"WAVE"


def read_format(content: bytes) -> WavFormat:
    """Reads the format from a file's header. Raises InvalidArgument if it is missing or cut off."""
    for name, start, _ in _chunks(content):
        if name == b"fmt ":
            return _format(content[start : start + 40])
    raise refused("the WAV file has no format chunk, so its header is damaged or cut off; send the complete file")


def read_wav(content: bytes, bounds: AudioBounds) -> Waveform:
    """Decodes a WAV file whose format is_read_here. Raises InvalidArgument for damaged headers and sizes beyond
    `bounds`."""
    form = read_format(content)
    check_format(form.rate, form.channels, bounds)
    start, end = _data(content)
    frame = form.channels * form.bits // 8
    num_samples = (end - start) // frame
    check_length(num_samples, form.rate, bounds)
    data = memoryview(content)[start : start + num_samples * frame]
    return require_samples(Waveform(mono(_values(data, form).reshape(-1, form.channels)), form.rate))


def float_wav(samples: F32, rate: int) -> bytes:
    """Returns a WAV file of float32 samples, [num_samples] or [num_samples, channels]."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    data, frame = np.ascontiguousarray(samples, dtype="<f4").tobytes(), 4 * channels
    form = struct.pack("<HHIIHH", FLOAT, channels, rate, rate * frame, frame, 32)
    chunks = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def _chunks(content: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yields name, start and stated size of the chunks, in order."""
    at = HEAD_BYTES
    for _ in range(MAX_CHUNKS):
        if at + CHUNK_HEAD_BYTES > len(content):
            return
        name, size = struct.unpack_from("<4sI", content, at)
        yield name, at + CHUNK_HEAD_BYTES, size
        at += CHUNK_HEAD_BYTES + size + size % 2


def _data(content: bytes) -> tuple[int, int]:
    """Returns start and end of the samples: as the header says, or to the end of the file if it says less than nothing
    or more than there is. Raises InvalidArgument if there is no data chunk."""
    for name, start, size in _chunks(content):
        if name == b"data":
            return start, min(start + size, len(content)) if size else len(content)
    raise refused("the WAV file has no data chunk, so it is cut off; send the complete file")


def _format(chunk: bytes) -> WavFormat:
    """Parses a `fmt ` chunk. Raises InvalidArgument if it is cut off."""
    if len(chunk) < FORMAT_BYTES:
        raise refused("the WAV file's header is cut off; send the complete file")
    coding, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if coding == EXTENSIBLE and len(chunk) >= 26:  # the coding is the start of the GUID of the sub-format
        coding = struct.unpack_from("<H", chunk, 24)[0]
    return WavFormat(coding, channels, rate, bits)


def _values(data: memoryview, form: WavFormat) -> F32:
    """Returns the samples of all channels, from -1 to 1."""
    values: F32
    match form.coding, form.bits:
        case (1, 8):
            values = (np.frombuffer(data, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
        case (1, 16):
            values = np.frombuffer(data, "<i2").astype(np.float32) / np.float32(1 << 15)
        case (1, 24):
            values = _wide_values(data)
        case (1, 32):
            values = np.frombuffer(data, "<i4").astype(np.float32) / np.float32(1 << 31)
        case (3, 32):
            values = np.frombuffer(data, "<f4").astype(np.float32)
        case (3, 64):
            values = np.frombuffer(data, "<f8").astype(np.float32)
        case (6, _):
            values = _A_LAW_VALUES[np.frombuffer(data, np.uint8)]
        case _:
            values = _MU_LAW_VALUES[np.frombuffer(data, np.uint8)]
    return values


def _wide_values(data: memoryview) -> F32:
    """Returns the values of signed little-endian samples of three bytes."""
    parts = np.frombuffer(data, np.uint8).reshape(-1, 3)
    wide = np.zeros((len(parts), 4), np.uint8)
    wide[:, 1:] = parts
    return wide.reshape(-1).view("<i4").astype(np.float32) / np.float32(1 << 31)


def _a_law() -> F32:
    """Returns the value of each code of ITU-T G.711 A-law."""
    code = np.arange(256) ^ 0x55
    exponent, mantissa = (code >> 4) & 7, code & 15
    linear = np.where(exponent == 0, (mantissa << 4) + 8, ((mantissa << 4) + 0x108) << np.maximum(exponent - 1, 0))
    return (np.where(code & 0x80, linear, -linear) / (1 << 15)).astype(np.float32)


def _mu_law() -> F32:
    """Returns the value of each code of ITU-T G.711 mu-law."""
    code = ~np.arange(256) & 0xFF
    exponent, mantissa = (code >> 4) & 7, code & 15
    linear = (((mantissa << 3) + 0x84) << exponent) - 0x84
    return (np.where(code & 0x80, -linear, linear) / (1 << 15)).astype(np.float32)


_A_LAW_VALUES, _MU_LAW_VALUES = _a_law(), _mu_law()
