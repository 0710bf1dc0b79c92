"""Decoding of files of videos (MP4, WebM, Matroska, AVI, MPEG, FLV, ASF, Ogg) with PyAV.

What a file's header says about the number of frames and their rate is often missing or wrong, so its packets are
counted and their times read, which decodes nothing.
"""

from __future__ import annotations

import contextlib
import io
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.services.frontend.media import pictures
from quire.services.frontend.media.policy import MediaBounds
from quire.shared.errors import InvalidArgument, Unimplemented
from quire.shared.media.video import VideoFacts

if TYPE_CHECKING:
    from PIL import Image

# Demuxers that read nothing but the file itself; playlists (HLS, DASH, concat) name other files and URLs.
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,h264,hevc,m4v,ivf"
CODECS = frozenset({
    "h264", "hevc", "av1", "libdav1d", "libaom-av1", "vp8", "libvpx", "vp9", "libvpx-vp9", "mpeg4", "mpeg2video",
    "mpeg1video", "mjpeg", "theora", "h263", "flv1", "flv", "msmpeg4v3", "msmpeg4", "wmv1", "wmv2", "wmv3", "vc1",
    "ffv1", "rawvideo", "png", "gif", "prores",
})  # fmt: skip
DEFAULT_FPS = 24.0  # of a file that says neither a rate nor times
RATES_DIFFER = 0.01  # relative difference from which the times count, not the header's rate
CUT_SHARE = 0.1  # of the announced frames that may be missing
BROKEN_SHARE = 0.1  # of the wanted frames that may be undecodable; others take their places


class ContainerVideo:
    """Video in a file of its own."""

    given = None

    def __init__(self, content: bytes, bounds: MediaBounds) -> None:
        """Reads size, number and times of the frames. Raises InvalidArgument for files without a video, beyond the
        bounds, or damaged."""
        self._content, self._bounds = content, bounds
        with self._opened() as (container, stream):
            pictures.check_dimensions(stream.width, stream.height, bounds)
            announced, rate = stream.frames, stream.average_rate
            self._times = self._read_times(container, stream)
            base = float(stream.time_base or 0)
        count = len(self._times)
        if not count:
            raise _refused("it has no frames; send a file with a video")
        if count < announced * (1 - CUT_SHARE) - 1:
            raise _refused(f"it is cut off: {count} of {announced} frames are there. Send the complete file")
        fps = _fps(float(rate or 0), self._times, base)
        if count / fps > bounds.video_s:
            raise _refused(f"it lasts {count / fps:.0f} s; at most {bounds.video_s:g} s are read. Send a shorter one")
        first = next(self.frames((0,)))
        self.facts = VideoFacts(count, fps, first.height, first.width)

    def frames(self, positions: Sequence[int]) -> Iterator[Image.Image]:
        """Yields the frames at `positions`. A frame that cannot be decoded is replaced by the one before it, or after
        it at the beginning. Raises InvalidArgument if too many cannot be."""
        wanted, replaced, last = list(positions), 0, None
        for number, frame in self._decoded():
            while wanted and wanted[0] < number:
                replaced += 1
                yield _image(last or frame)
                wanted.pop(0)
            while wanted and wanted[0] == number:
                yield _image(frame)
                wanted.pop(0)
            if not wanted:
                break
            last = frame
        if last is None and wanted:
            raise _refused("none of its frames can be decoded; the file is damaged")
        num_broken = replaced + len(wanted)
        if num_broken > max(1, len(positions) * BROKEN_SHARE):
            raise _refused(f"{num_broken} of {len(positions)} frames cannot be decoded; the file is damaged")
        for _ in wanted:
            yield _image(last)

    def _decoded(self) -> Iterator[tuple[int, Any]]:
        """Yields frames that can be decoded, in the order in which they are shown, with their numbers."""
        import av

        number = -1
        with self._opened() as (container, stream):
            for packet in _packets(container, stream):
                frames: list[Any] = []
                with contextlib.suppress(av.FFmpegError):
                    frames = packet.decode()
                for frame in frames:
                    number = self._number(frame.pts, number + 1)
                    yield number, frame

    def _number(self, time: int | None, next_number: int) -> int:
        """Returns the number of the frame that is shown at `time`; `next_number` if no packet had that time."""
        at = next_number if time is None else bisect_left(self._times, time)
        is_known = at < len(self._times) and self._times[at] == time
        return max(at, next_number) if is_known else next_number

    def _read_times(self, container: Any, stream: Any) -> list[int]:
        """Returns the times of all frames, ascending, in units of the stream. Raises InvalidArgument for more than the
        bounds allow."""
        times: list[int] = []
        for packet in _packets(container, stream):
            if packet.size:
                time = packet.pts if packet.pts is not None else packet.dts
                times.append(len(times) if time is None else time)
            if len(times) > self._bounds.frames:
                most = self._bounds.frames
                raise _refused(f"it has more than {most} frames; at most {most} are read. Send a shorter one")
        return sorted(times)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """Opens the file and selects its video. Raises InvalidArgument for files without one, of other formats, or
        damaged, Unimplemented without PyAV."""
        try:
            import av
        except ImportError:
            raise Unimplemented(
                "messages: videos require the package av, which the frontend lacks; install it (pip install av)",
                field="messages",
            ) from None
        try:
            with av.open(
                io.BytesIO(self._content), container_options={"format_whitelist": FORMATS}, io_open=_no_other_file
            ) as container:
                stream = next((one for one in container.streams.video if not _is_cover(one)), None)
                if stream is None:
                    raise _refused("it has no video, only sound or pictures of its cover")
                if stream.codec_context is None or stream.codec_context.codec.name not in CODECS:
                    raise _refused("its codec is not supported; convert it to H.264 in MP4")
                stream.codec_context.thread_count = 1
                yield container, stream
        except (av.FFmpegError, ValueError, OverflowError):
            raise _refused("the file is damaged, cut off, or no video; send the complete file") from None


def _packets(container: Any, stream: Any) -> Iterator[Any]:
    """Yields the packets of a stream, and the empty one that ends it; the end of a file that is cut off ends them."""
    import av

    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError:
            return
        if packet is None:
            return
        yield packet


def _no_other_file(*_: Any) -> Any:
    """Refuses to open further files or URLs, which a file may name."""
    raise PermissionError("a video may not name other files")


def _is_cover(stream: Any) -> bool:
    """Returns whether a stream is the picture of a sound file's cover."""
    import av

    return bool(stream.disposition & av.stream.Disposition.attached_pic)


def _fps(rate: float, times: Sequence[int], base: float) -> float:
    """Returns the frames per second: the header's `rate` if the times of the frames, in units of `base` seconds, agree
    with it."""
    seconds = (times[-1] - times[0]) * base
    measured = (len(times) - 1) / seconds if seconds > 0 else 0.0
    if measured and abs(rate - measured) > RATES_DIFFER * measured:
        return measured
    return rate or measured or DEFAULT_FPS


def _image(frame: Any) -> Image.Image:
    """Returns a frame as an RGB picture, turned as the file says."""
    image: Image.Image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def _refused(reason: str) -> InvalidArgument:
    return InvalidArgument(f"Failed to load video: {reason}", field="messages")
