"""Decoding of sound files to one channel of float32 samples, in all formats that are accepted.

WAV is read here; other formats and other codings of WAV need PyAV, which comes with the extra `frontend`. The demuxer
is chosen by the first bytes and named to PyAV, so that a file cannot select one that opens further files or addresses.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.shared.media.audio.resampling import resampled
from quire.shared.media.audio.wav import is_wav, read_format, read_wav
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

FORMATS = ("wav", "mp3", "flac", "ogg", "m4a", "webm", "aac")
DEFAULT_BOUNDS = AudioBounds()
SOUND_ONLY = ("wav", "mp3", "flac", "ogg", "aac")  # demuxers
SNIFFED_BYTES = 16
MPEG_SYNC = 0xFF


def demuxer(content: bytes) -> str | None:
    """Returns FFmpeg's name of the demuxer for a file, by its first bytes; None: none of FORMATS."""
    head = content[:SNIFFED_BYTES]
    if is_wav(content):
        return "wav"
    for start, name in ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"\x1aE\xdf\xa3", "matroska"), (b"ID3", "mp3")):
        if head.startswith(start):
            return name
    if head[4:8] == b"ftyp":
        return "mov"
    if len(head) > 1 and head[0] == MPEG_SYNC and head[1] & 0xE0 == 0xE0:
        return "aac" if head[1] & 0x06 == 0 else "mp3"  # layer 0 is ADTS
    return None


def is_sound_file(head: bytes) -> bool:
    """Returns whether the first SNIFFED_BYTES of a file are those of a format that has sound alone. Containers that may
    have video or pictures as well, such as MP4, WebM and AVIF, are not taken for sound."""
    return demuxer(head) in SOUND_ONLY or head[4:11] == b"ftypM4A"


def decode(content: bytes, rate: int, bounds: AudioBounds = DEFAULT_BOUNDS) -> F32:
    """Decodes a file to `rate` samples a second, one channel: the mean of all. Raises InvalidArgument, never with the
    decoder's own text, for other formats, damaged files, files beyond `bounds`, and formats that need PyAV where it is
    not installed."""
    return at_rate(decode_file(content, bounds), rate)


def at_rate(wave: Waveform, rate: int) -> F32:
    """Returns the samples of a wave at `rate` samples a second."""
    return resampled(wave.samples, wave.rate, rate)


def decode_file(content: bytes, bounds: AudioBounds = DEFAULT_BOUNDS) -> Waveform:
    """Decodes a file at its own sampling rate. Raises InvalidArgument as decode()."""
    name = demuxer(content)
    if name is None:
        raise refused(f"it is none of {', '.join(FORMATS)}; convert it to one of them")
    if name == "wav":
        form = read_format(content)
        if form.is_read_here:
            return read_wav(content, bounds)
        check_format(form.rate, form.channels, bounds)
    return _decode_by_av(content, name, bounds)


def _decode_by_av(content: bytes, name: str, bounds: AudioBounds) -> Waveform:
    """Decodes the first sound stream of a file with the demuxer `name`. Raises InvalidArgument."""
    try:
        import av
    except ImportError:
        raise refused(
            f"files other than PCM wav need the package av on the server (pip install av); this one is "
            f"{name}. Send PCM wav instead."
        ) from None
    av.logging.set_level(None)
    try:
        with av.open(io.BytesIO(content), format=name, metadata_errors="ignore") as container:
            return _decode_container(container, bounds)
    except (av.error.FFmpegError, ValueError, OverflowError, IndexError, EOFError):
        raise refused("the file is damaged or cut off; send the complete file") from None


def _decode_container(container: Any, bounds: AudioBounds) -> Waveform:
    """Decodes the first sound stream of an open file. A file that ends in the middle gives what came before. Raises
    InvalidArgument for files without sound and beyond `bounds`; errors of PyAV if nothing can be decoded."""
    import av

    stream = next(iter(container.streams.audio), None)
    if stream is None:
        raise refused("it has no sound stream; send a sound file")
    rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
    check_format(rate, channels, bounds)
    if stream.duration and stream.time_base:
        check_length(int(stream.duration * stream.time_base * rate), rate, bounds)
    resampler = av.AudioResampler(format="fltp", layout=stream.codec_context.layout, rate=rate)
    parts: list[F32] = []
    count = 0
    try:
        for frame in container.decode(stream):
            check_format(frame.sample_rate, frame.layout.nb_channels, bounds)
            for part in resampler.resample(frame):
                count += part.samples
                check_length(count, rate, bounds)
                parts.append(mono(part.to_ndarray().T))
    except (av.error.InvalidDataError, av.error.EOFError):
        if not parts:
            raise
    return require_samples(Waveform(np.concatenate(parts) if parts else np.zeros(0, np.float32), rate))
